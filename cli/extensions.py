"""Finds what a clone of the repository adds to `atoll`, by entry point: the plain install has none of it."""

from importlib.metadata import EntryPoint, entry_points

from atoll.protocols.errors import ConfigError


def extension(group: str, name: str, what: str) -> EntryPoint:
    """The entry point `name` of `group`, not loaded. Raises ConfigError, which calls it `what`, without it."""
    found = next(iter(entry_points(group=group, name=name)), None)
    if found is None:
        raise ConfigError(
            f"{what}: not part of the plain install", hint="`git clone` the repository; `make setup`"
        )
    return found
