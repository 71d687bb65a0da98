"""On a GPU: R payloads -> U, or θ + U, in one pass over the chunks, in exact integers; codec `sparse2`.

The bits and the refusals of `atoll.node.learning.compress.folding`. Payloads come from the host's memory,
all at once.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from atoll.node.learning.compress.folding import Given, Member, OuterStep, given_of
from atoll.node.learning.compress.gpu.adding import LEFT_RANGE, fold
from atoll.node.learning.compress.sparse_fold import FAULTS
from atoll.node.learning.kernels.on_gpu import EXACT, check_together, power_of_two
from atoll.protocols.errors import MODEL_LOST, DecodeError, Divergence
from atoll.protocols.run.arena import CHUNK
from atoll.protocols.run.payload import Layout

MOST_PROGRAMS = 1024
"""Programs, each with 48 KiB of sums."""
_ORDER = (6, 2, 3, 1, 4, 5)
"""Which fault is told where there are several: as the CPU looks."""


def can_fold(layout: Layout) -> bool:
    """Whether there are kernels for this codec."""
    return layout.codec == "sparse2"


def update_of(
    members: Sequence[Member], chunks: int, k: int, step: OuterStep, *, codec: str, device: torch.device
) -> Tensor:
    """U int32 `[chunks, 4096]`, units of 2⁻²⁴, on the device; as `compress.folding.update_of`."""
    update = torch.empty((chunks, CHUNK), dtype=torch.int32, device=device)
    _run(members, Layout(codec, chunks, k), step, update, update, moves=False)
    return update


def fold_into(
    theta_C4096: Tensor, members: Sequence[Member], k: int, step: OuterStep, out_C4096: Tensor, *, codec: str
) -> None:
    """θ + U into `out_C4096`, both int32 on the device; as `compress.folding.fold_into`."""
    _run(members, Layout(codec, len(theta_C4096), k), step, theta_C4096, out_C4096, moves=True)


def _run(
    members: Sequence[Member], layout: Layout, step: OuterStep, theta: Tensor, out: Tensor, *, moves: bool
) -> None:
    check_together(theta, out)
    given, device = given_of(members, layout), out.device
    places, programs = given.places, max(1, min(layout.chunks, MOST_PROGRAMS))
    faults = torch.zeros(1, dtype=torch.int32, device=device)
    total = torch.zeros((programs, CHUNK), dtype=torch.int64, device=device)
    share = torch.zeros((programs, CHUNK), dtype=torch.int32, device=device)

    def there(values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(device)

    with torch.cuda.device(out.get_device()):
        fold[(programs,)](
            there(given.bytes), given.bytes.shape[1], there(places.offset_PS), there(places.rows_UC),
            there(places.map_P), there(given.weight_P.astype(np.int32)), there(_least(given, step.floor_256)),
            total, share, theta, out, faults, len(members), layout.chunks, step.alpha_256,
            k=layout.k, low_bits=layout.low_bits, high_bits=layout.high_bits,
            bits_size=power_of_two(8 * layout.row_bytes[2]), lows=layout.row_bytes[1], highs=layout.row_bytes[2],
            codes=layout.row_bytes[3], size=CHUNK, moves=moves, num_warps=4, **EXACT,
        )  # fmt: skip
    _raise(int(faults))


def _least(given: Given, floor_256: int) -> npt.NDArray[np.int32]:
    """The least divisor of each chunk: that share of all weight that covers it, rounded up, at least 1."""
    rows_UC, map_P, _ = given.places
    weight_C = np.zeros(rows_UC.shape[1], np.int64)
    for number, rows_C in enumerate(rows_UC):
        weight_C += (rows_C >= 0) * given.weight_P[map_P == number].sum()
    least_C: npt.NDArray[np.int32] = np.maximum(1, (floor_256 * weight_C + 255) >> 8).astype(np.int32)
    return least_C


def _raise(faults: int) -> None:
    for number in _ORDER:
        if faults >> number & 1:
            raise DecodeError(f"payload: {FAULTS[number]}")
    if faults >> LEFT_RANGE & 1:
        raise Divergence("a weight left its range of -128 … 128", hint=MODEL_LOST)
