"""Rotary positions in `config.json`: version 5 of transformers has one object, version 4 a base and a scaling."""

from collections.abc import Mapping
from typing import Any

from atoll.node.export.fields import real
from atoll.protocols.errors import ConfigError
from atoll.protocols.model import ModelSpec

OBJECT, SCALING, BASE = "rope_parameters", "rope_scaling", "rope_theta"
KEYS = {OBJECT, SCALING, BASE}
DEFAULT_BASE = 10_000.0
"""Where a config has none, for all classes that we read."""


def rope_config(model: ModelSpec) -> dict[str, Any]:
    """The keys for a model, in the words of both versions."""
    return {OBJECT: {"rope_type": "default", BASE: model.rope_theta}, BASE: model.rope_theta}


def rope_of(config: Mapping[str, Any], default: float = DEFAULT_BASE) -> float:
    """The base of a config's rotations, or `default`. As in transformers `rope_scaling` goes before
    `rope_parameters`, and a base that stands inside before one beside it. Raises ConfigError.
    """
    key = SCALING if config.get(SCALING) else OBJECT
    found = {} if config.get(key) is None else config[key]
    if not isinstance(found, Mapping):
        raise ConfigError(f"config.json: {key} = {found!r} is not supported")
    kind = found.get("rope_type", found.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"config.json: rope_type {kind!r} is not supported")
    if set(found) - {"rope_type", "type", BASE}:
        raise ConfigError(f"config.json: {key} = {found!r} is not supported")
    holder = found if found.get(BASE) is not None else config
    return default if holder.get(BASE) is None else real(holder, BASE)
