"""Values of a stranger's JSON by key: of the right kind, or refused in one line."""

from collections.abc import Mapping
from typing import Any

from atoll.protocols.errors import ConfigError


def whole(config: Mapping[str, Any], key: str) -> int:
    """A whole number. Raises ConfigError."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"config.json: {key} = {value!r} is not a whole number")
    return value


def real(config: Mapping[str, Any], key: str) -> float:
    """A number. Raises ConfigError."""
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigError(f"config.json: {key} = {value!r} is not a number")
    try:
        return float(value)
    except OverflowError as error:
        raise ConfigError(f"config.json: {key} is too large") from error
