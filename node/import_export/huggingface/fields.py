"""Values of a stranger's JSON by key: of the right kind, or refused in one line."""

from collections.abc import Mapping
from typing import Any

from atoll.protocols.errors import ConfigError

CONFIG = "config.json"


def whole(config: Mapping[str, Any], key: str, where: str = CONFIG) -> int:
    """A whole number. `where`: what the error calls the file. Raises ConfigError."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{where}: {key} = {value!r} is not a whole number")
    return value


def real(config: Mapping[str, Any], key: str, where: str = CONFIG) -> float:
    """A number. `where`: what the error calls the file. Raises ConfigError."""
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigError(f"{where}: {key} = {value!r} is not a number")
    try:
        return float(value)
    except OverflowError as error:
        raise ConfigError(f"{where}: {key} is too large") from error


def flag(config: Mapping[str, Any], key: str, where: str = CONFIG) -> bool:
    """True or false; false where it is not said. Raises ConfigError."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{where}: {key} = {value!r} is not true or false")
    return bool(value)
