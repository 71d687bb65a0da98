"""Packs moments of some atoms into bytes, and checks those of a peer before use (protocols/run/moments.py).

A peer's moments are untrusted, and wrong ones could move weights far: a step is m̂ / √v̂ of the rate. For any real
gradients Cauchy and Schwarz give m² ≤ C · v with C = (1 − β₁)² / ((1 − β₂) (1 − β₁² / β₂)). Moments that violate
this are refused. Moments that satisfy it can at worst make the steps of their atoms too small for a while.

Muon's steps have one size whatever its momentum is, so a wrong one can only point elsewhere, until the node's own
gradients outweigh it. Gradients are clipped, so no momentum of an expert has a norm above the clip's.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from atoll.protocols.errors import DecodeError
from atoll.protocols.run.moments import HEAD_BYTES, KINDS, MAX_STEPS, MOMENTUM, kinds_of
from atoll.protocols.run.run_spec import InnerSpec

_ROUNDING = 1.05
"""Factor above what two roundings to bfloat16 can add to m² / v."""
Shapes = Sequence[tuple[str, tuple[int, ...]]]
"""Names and shapes of atoms, in the order of the file."""


def second_moment_bound(spec: InnerSpec) -> float:
    """The bound C of m² / v; 0 if there is none, because second moments decay faster than first ones."""
    share = spec.beta1**2 / spec.beta2 if spec.beta2 else 1.0
    return (1 - spec.beta1) ** 2 / ((1 - spec.beta2) * (1 - share)) if share < 1 else 0.0


def pack(state: Mapping[str, Tensor], names: Sequence[str]) -> bytes:
    """The file of these atoms of a state that `Inner.state` returned; empty if they have not been trained."""
    if not names or any(f"step/{name}" not in state for name in names):
        return b""
    steps = int(state[f"step/{names[0]}"])
    keys = [f"{moment}/{name}" for moment in KINDS for name in names]
    rows = [state[key].reshape(-1) for key in keys if key in state]
    values = torch.cat([row.to("cpu", torch.bfloat16) for row in rows])
    return steps.to_bytes(HEAD_BYTES, "little") + values.view(torch.uint8).numpy().tobytes() if steps else b""


def unpack(data: bytes, shapes: Shapes, spec: InnerSpec) -> dict[str, Tensor]:
    """The state as of `Inner.state`, float32. Raises DecodeError for values that no honest optimiser can have."""
    sizes = [torch.Size(shape).numel() for _, shape in shapes]
    # All matrices of an expert are moved by one optimizer, so all have the same kinds of moments.
    kinds = kinds_of(spec.optimizer, shapes[0][0])
    steps = int.from_bytes(data[:HEAD_BYTES], "little")
    if len(data) != HEAD_BYTES + 2 * len(kinds) * sum(sizes) or not 0 < steps <= MAX_STEPS:
        raise DecodeError("not the moments of this many atoms")
    values = torch.frombuffer(bytearray(data), dtype=torch.bfloat16, offset=HEAD_BYTES).float()
    moments = values.chunk(len(kinds))
    if kinds == MOMENTUM:
        _check_momentum(values, spec)
    else:
        first, second = moments
        _check(first, second, spec)
    found = {f"step/{name}": torch.tensor([float(steps)]) for name, _ in shapes}
    for kind, rows in zip(kinds, moments, strict=True):
        parts = zip(shapes, torch.split(rows, sizes), strict=True)
        found.update({f"{kind}/{name}": part.view(shape) for (name, shape), part in parts})
    return found


def _check_momentum(momentum: Tensor, spec: InnerSpec) -> None:
    """A mean of gradients whose norm is at most `clip` has at most that norm. NaN fails the comparison."""
    if not float(momentum.double().norm()) <= _ROUNDING * spec.clip:
        raise DecodeError("a momentum that no clipped gradients can have given")


def _check(first: Tensor, second: Tensor, spec: InnerSpec) -> None:
    limit = _ROUNDING * second_moment_bound(spec) * second.double() + spec.eps**2
    sound = first.isfinite() & second.isfinite() & (second >= 0) & (first.double() ** 2 <= limit)
    if not second_moment_bound(spec) or not bool(sound.all()):
        raise DecodeError("moments that no gradients can have given")
