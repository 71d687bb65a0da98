"""Rotary positions in `config.json`: transformers 5 has one object for them, version 4 a base and a scaling."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from atoll.node.import_export.huggingface.fields import read_float, read_int
from atoll.protocols.errors import ConfigError
from atoll.protocols.run.model_spec import ModelSpec, RopeStretch

OBJECT, SCALING, BASE = "rope_parameters", "rope_scaling", "rope_theta"
KEYS = {OBJECT, SCALING, BASE}
DEFAULT_BASE = 10_000.0
_FACTOR, _LOW, _HIGH = "factor", "low_freq_factor", "high_freq_factor"
_ORIGINAL = "original_max_position_embeddings"
_INSIDE = {"default": set[str](), "llama3": {_FACTOR, _LOW, _HIGH, _ORIGINAL}}
"""Keys of an object of each type beside its type and base."""


class Rope(NamedTuple):
    """The rotary fields of a ModelSpec."""

    theta: float
    stretch: RopeStretch | None


def rope_config(model: ModelSpec) -> dict[str, Any]:
    """The keys of `config.json` for a model, for both versions of transformers."""
    scaling = None if model.rope_stretch is None else _scaling(model.rope_stretch)
    plain = {"rope_type": "default"} if scaling is None else scaling
    return {OBJECT: {**plain, BASE: model.rope_theta}, SCALING: scaling, BASE: model.rope_theta}


def rope_from_config(config: Mapping[str, Any], default: float = DEFAULT_BASE) -> Rope:
    """The rotary fields of a config; the base is `default` if it has none. Raises ConfigError.

    As in transformers, `rope_scaling` overrides `rope_parameters`, and a base inside overrides one beside it.
    """
    key = SCALING if config.get(SCALING) else OBJECT
    found = {} if config.get(key) is None else config[key]
    if not isinstance(found, Mapping):
        raise ConfigError(f"config.json: {key} = {found!r} is not supported")
    kind = found.get("rope_type", found.get("type", "default"))
    if not isinstance(kind, str) or kind not in _INSIDE:
        raise ConfigError(f"config.json: rope_type {kind!r} is not supported")
    if set(found) - _INSIDE[kind] - {"rope_type", "type", BASE}:
        raise ConfigError(f"config.json: {key} = {found!r} is not supported")
    holder = found if found.get(BASE) is not None else config
    theta = default if holder.get(BASE) is None else read_float(holder, BASE)
    return Rope(theta, _stretch(found) if kind == "llama3" else None)


def _scaling(stretch: RopeStretch) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        _FACTOR: stretch.factor,
        _LOW: stretch.low,
        _HIGH: stretch.high,
        _ORIGINAL: stretch.original,
    }


def _stretch(found: Mapping[str, Any]) -> RopeStretch:
    factor, low, high = (read_float(found, key) for key in (_FACTOR, _LOW, _HIGH))
    return RopeStretch(factor=factor, low=low, high=high, original=read_int(found, _ORIGINAL))
