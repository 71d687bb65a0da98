"""What a clone of the repository adds to `atoll`: found by entry point, because the plain install has none of it."""

from importlib.metadata import EntryPoint, entry_points

from atoll.protocols.errors import ConfigError


def extension(group: str, name: str, what: str) -> EntryPoint:
    """The entry point `name` of `group`, not loaded; `what` names it to the user. Raises ConfigError without it."""
    found = next(iter(entry_points(group=group, name=name)), None)
    if found is None:
        raise ConfigError(f"{what}: not part of the plain install", hint="run `pip install -e tests` in a clone")
    return found
