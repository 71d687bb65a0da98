"""Zeroth-order runs: members send one byte a step, and what such a run cannot go with (docs/zeroth-order.md).

A step of SPSA moves all weights along one direction z of signs, by a scalar: −η·g·z with the projected gradient
g = (ℓ(θ + εz) − ℓ(θ − εz)) / 2ε. Everybody makes z from a seed that follows from run, round and author, so a
contribution is its scalars (MeZO, arXiv 2305.17333; decentralised: arXiv 2306.10015).
"""

from fractions import Fraction
from typing import Any

from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import PeerId, digest
from atoll.protocols.run.payload import SCALAR, TOP_SCALAR
from atoll.protocols.run.sections.refusals import Refusal, refuse

DEFAULT_SPREAD = 0.001
"""ε of SPSA if unset, as published."""
UNIT_BITS = 30
"""The unit of a scalar counts steps of 2⁻³⁰ of a weight."""
MAX_UNIT = (1 << 16) - 1
"""Largest unit: sums of the fold have room for it (node/learning/zeroth_order/scalar_fold.py)."""
_SEED_BYTES = 8
_DOMAIN = b"atoll/direction/1\0"


def is_scalar(spec: Any) -> bool:
    """Whether a run's members send scalars."""
    return bool(spec.compress.codec == SCALAR)


def unit_of(lr: float, clip: float) -> int:
    """How far a scalar of 1 moves each weight, in steps of 2⁻³⁰: lr·clip/127, so that 127 is the longest step.

    Exact rational arithmetic: every member has the same unit. 0 where the product is too small.
    """
    return round(Fraction(lr) * Fraction(clip) * (1 << UNIT_BITS) / TOP_SCALAR)


def seed_of(run: bytes, number: int, author: PeerId) -> int:
    """Seed, 64 bits, of the directions of one author in one round. Nobody can choose it."""
    named = _DOMAIN + run + number.to_bytes(8, "little") + author.encode()
    return int.from_bytes(digest(named)[:_SEED_BYTES], "little")


_REFUSED: tuple[Refusal, ...] = (
    ("reduce", lambda spec: spec.reduce is not None, "a payload has no rows to reduce; set it to null"),
    (
        "outer.fragments",
        lambda spec: spec.outer.fragments > 1,
        "a step moves all weights at once, and its byte cannot be cut",
    ),
    (
        "outer.overlap_steps",
        lambda spec: bool(spec.outer.overlap_steps),
        "local weights ahead of the view would need a copy of the model; set it to 0",
    ),
    ("outer.holders", lambda spec: bool(spec.outer.holders), "a step moves all weights at once"),
    (
        "model.experts",
        lambda spec: spec.model.experts is not None,
        "the biases of its routers move without a direction, and no scalar says how far",
    ),
    (
        "outer.aggregate",
        lambda spec: bool(spec.outer.aggregate),
        "rules judge values, and scalars have none; inner.clip bounds each of them",
    ),
    ("audit", lambda spec: bool(spec.audit), "audits look at values, and scalars have none"),
    (
        "outer.spectrum",
        lambda spec: bool(spec.outer.spectrum),
        "a sum of a few directions would be moved along directions that nobody tried",
    ),
    (
        "compress.feedback",
        lambda spec: bool(spec.compress.feedback or spec.compress.feedback_rule),
        "all that a member moved by is sent; set it to 0",
    ),
    ("compress.warmup", lambda spec: bool(spec.compress.warmup), "every step is sent in every round"),
    (
        "inner.weight_decay",
        lambda spec: bool(spec.inner.weight_decay),
        "no scalar says how far weights decayed; set it to 0",
    ),
    ("start.moments", lambda spec: bool(spec.start and spec.start.moments), "SPSA has no moments"),
)


def check_zeroth_order(spec: Any) -> None:
    """Raise ConfigError for a RunSpec whose settings do not go with scalars, or with none."""
    if is_scalar(spec) != (spec.inner.optimizer == "spsa"):
        raise ConfigError("inner.optimizer spsa and compress.codec scalar go together, and with no other")
    if not is_scalar(spec):
        if spec.inner.spread != DEFAULT_SPREAD:
            raise ConfigError("inner.spread is for runs with inner.optimizer spsa")
        return
    refuse(spec, "inner.optimizer spsa", _REFUSED)
    most = max(-(-stage.steps * spec.pace.most_256 // 256) for stage in spec.outer.stages)
    if spec.compress.k < most:
        raise ConfigError(f"compress.k = {spec.compress.k}: a member may take {most} steps, and each has a scalar")
    unit = unit_of(spec.inner.lr, spec.inner.clip)
    if not 1 <= unit <= MAX_UNIT:
        low, high = (TOP_SCALAR * bound * 2.0**-UNIT_BITS for bound in (1, MAX_UNIT))
        raise ConfigError(
            f"inner.lr · inner.clip, the longest step of a weight, is outside {low:.1e} … {high:.1e}: "
            "weights are whole multiples of a smallest step"
        )
