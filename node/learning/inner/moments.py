"""Moments of some atoms as bytes, and what must hold of them before they are used (protocols/run/moments.py).

They come from a stranger, and wrong ones could throw weights far: a step is m̂ / √v̂ of the rate. Of gradients that
anybody could have had, Cauchy and Schwarz bound it: m² ≤ C · v with C = (1 − β₁)² / ((1 − β₂) (1 − β₁² / β₂)).
What does not keep that is refused. What does can only make the steps of its atoms too small for a while.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from atoll.protocols.errors import DecodeError
from atoll.protocols.run.moments import HEAD_BYTES, KINDS, MAX_STEPS
from atoll.protocols.run.run_spec import InnerSpec

_ROUNDING = 1.05
"""More than two roundings to bfloat16 can add to m² / v."""
Shapes = Sequence[tuple[str, tuple[int, ...]]]
"""Atoms by name, in the order of the file."""


def second_moment_bound(spec: InnerSpec) -> float:
    """C; 0 where there is none, because the second moments forget faster than the first ones."""
    share = spec.beta1**2 / spec.beta2 if spec.beta2 else 1.0
    return (1 - spec.beta1) ** 2 / ((1 - spec.beta2) * (1 - share)) if share < 1 else 0.0


def pack(state: Mapping[str, Tensor], names: Sequence[str]) -> bytes:
    """The file of these atoms of what `Inner.state` gave; empty where they have not been trained."""
    if not names or any(f"step/{name}" not in state for name in names):
        return b""
    steps = int(state[f"step/{names[0]}"])
    rows = [state[f"{moment}/{name}"].reshape(-1) for moment in KINDS for name in names]
    values = torch.cat([row.to("cpu", torch.bfloat16) for row in rows])
    return steps.to_bytes(HEAD_BYTES, "little") + values.view(torch.uint8).numpy().tobytes() if steps else b""


def unpack(data: bytes, shapes: Shapes, spec: InnerSpec) -> dict[str, Tensor]:
    """What `Inner.state` gave, float32. Raises DecodeError for what no honest optimiser can have."""
    sizes = [torch.Size(shape).numel() for _, shape in shapes]
    steps = int.from_bytes(data[:HEAD_BYTES], "little")
    if len(data) != HEAD_BYTES + 4 * sum(sizes) or not 0 < steps <= MAX_STEPS:
        raise DecodeError("not the moments of this many atoms")
    values = torch.frombuffer(bytearray(data), dtype=torch.bfloat16, offset=HEAD_BYTES).float()
    first, second = values.chunk(2)
    _check(first, second, spec)
    found = {f"step/{name}": torch.tensor([float(steps)]) for name, _ in shapes}
    for kind, rows in zip(KINDS, (first, second), strict=True):
        parts = zip(shapes, torch.split(rows, sizes), strict=True)
        found.update({f"{kind}/{name}": part.view(shape) for (name, shape), part in parts})
    return found


def _check(first: Tensor, second: Tensor, spec: InnerSpec) -> None:
    limit = _ROUNDING * second_moment_bound(spec) * second.double() + spec.eps**2
    sound = first.isfinite() & second.isfinite() & (second >= 0) & (first.double() ** 2 <= limit)
    if not second_moment_bound(spec) or not bool(sound.all()):
        raise DecodeError("moments that no gradients can have given")
