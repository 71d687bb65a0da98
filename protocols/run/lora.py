"""LoRA: which matrices of a frozen base get an adapter, of what size, and what a run with one cannot go with.

An adapter of a matrix W `[out, in]` is a pair A `[r, in]`, B `[out, r]`: the layer computes W·x + (α/r)·B·(A·x)
(LoRA, arXiv 2106.09685 §4.1). The pairs are all that such a run trains, sends, folds and saves (docs/lora.md).
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeAlias

from msgspec import Meta

from atoll.protocols.errors import ConfigError

MAX_RANK = 1024
Rank: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_RANK)]
Alpha: TypeAlias = Annotated[float, Meta(gt=0, le=1 << 16)]
Targets: TypeAlias = Annotated[str, Meta(max_length=32)]
ALL_TARGETS = "all"
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_FFN = ("gate_proj", "up_proj", "down_proj")
TARGETS = {ALL_TARGETS: (*_ATTENTION, *_FFN), "attention": _ATTENTION, "ffn": _FFN, "qv": ("q_proj", "v_proj")}
"""Legal values of `model.lora_targets`, and the projections of each layer that they name."""
FACTORS = ("lora_A", "lora_B")
"""Modules of a pair, by their names in peft."""
_WEIGHT = ".weight"
_SHARED = ("embed", "embedding", "embed_tokens", "lm_head", "head")
_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "start",
        lambda spec: bool(spec.start),
        "the imported weights are the frozen base, and an adapter begins at zero",
    ),
    (
        "outer.fragments",
        lambda spec: spec.outer.fragments > 1,
        "an adapter is small, and its vectors are one fragment",
    ),
    ("audit", lambda spec: bool(spec.audit), "audits look at the layers' matrices, and these are frozen"),
    (
        "inner.optimizer muon",
        lambda spec: spec.inner.optimizer == "muon",
        "Muon moves the layers' matrices, and these are frozen; AdamW moves adapters",
    ),
    (
        "outer.spectrum",
        lambda spec: bool(spec.outer.spectrum),
        "adapters are vectors, and an isotropic mean is one of matrices",
    ),
)
"""Keys of a RunSpec, whether one uses them, and why adapters do not go with them."""


def is_target(atom: str, targets: str) -> bool:
    """Whether an atom of the base is a matrix that gets an adapter."""
    return atom.endswith(_WEIGHT) and atom.removesuffix(_WEIGHT).rpartition(".")[2] in TARGETS[targets]


def is_adapter(atom: str) -> bool:
    """Whether an atom is a factor of an adapter."""
    return atom.removesuffix(_WEIGHT).rpartition(".")[2] in FACTORS


def factors_of(target: str) -> tuple[str, str]:
    """The atoms A and B of a matrix, by its atom's name: `q_proj.weight` -> `q_proj.lora_A.weight`, …"""
    at = target.removesuffix(_WEIGHT)
    return f"{at}.{FACTORS[0]}{_WEIGHT}", f"{at}.{FACTORS[1]}{_WEIGHT}"


def check_targets(rank: int, targets: str, *, is_given: bool) -> None:
    """Raise ConfigError for targets that no adapter can have, and for keys of one in a run without adapters.

    `is_given`: whether a key other than the rank is set.
    """
    if targets in _SHARED:
        raise ConfigError(
            f"model.lora_targets = {targets!r}: embedding and head are frozen, and a tied one is both at once",
            hint=f"use one of {', '.join(TARGETS)}",
        )
    if targets not in TARGETS:
        raise ConfigError(f"model.lora_targets = {targets!r} is none of {', '.join(TARGETS)}")
    if is_given and not rank:
        raise ConfigError("model.lora_alpha and model.lora_targets are for runs with model.lora_rank")


def check_rank(rank: int, sides: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ConfigError for a rank above a side of a target. `sides`: shapes of a layer's targets by names."""
    for name, shape in sides.items():
        if rank > min(shape):
            raise ConfigError(f"model.lora_rank = {rank} is above the smaller side of {name}, {min(shape)}")


def check_lora(spec: Any) -> None:
    """Raise ConfigError for a RunSpec whose settings do not go with an adapter, or with none."""
    is_adapted = bool(spec.model.lora_rank)
    if spec.base and not is_adapted:
        raise ConfigError("base is for runs with model.lora_rank: others start from their weights")
    if is_adapted and not spec.base:
        raise ConfigError(
            "model.lora_rank needs imported weights, which are the frozen base", hint="make the run --from-hf DIR"
        )
    for key, is_used, why in _REFUSED if is_adapted else ():
        if is_used(spec):
            raise ConfigError(f"model.lora_rank and {key} cannot go together: {why}")
