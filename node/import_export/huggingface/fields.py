"""Reads values of an untrusted JSON object by key; a value of another type is refused in one line."""

from collections.abc import Mapping
from typing import Any

from atoll.protocols.errors import ConfigError

CONFIG = "config.json"


def read_int(config: Mapping[str, Any], key: str, where: str = CONFIG) -> int:
    """An integer; `where` names the file in errors. Raises ConfigError."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{where}: {key} = {value!r} is not a whole number")
    return value


def read_float(config: Mapping[str, Any], key: str, where: str = CONFIG) -> float:
    """A number; `where` names the file in errors. Raises ConfigError."""
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigError(f"{where}: {key} = {value!r} is not a number")
    try:
        return float(value)
    except OverflowError as error:
        raise ConfigError(f"{where}: {key} is too large") from error


def read_bool(config: Mapping[str, Any], key: str, where: str = CONFIG) -> bool:
    """A boolean, false if absent; `where` names the file in errors. Raises ConfigError."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{where}: {key} = {value!r} is not true or false")
    return bool(value)
