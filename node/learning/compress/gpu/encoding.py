"""On a GPU: β·e + (anchor − local) -> payload and new e in one pass over the three arrays; codec `sparse2`.

The bytes and the e are those of `compress.encoding`. Where the new e goes to another array than e, a Divergence
leaves e as it was and nothing is read twice. A worker saves the memory of that array: it asks `is_sound` before.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from atoll.node.learning.compress.gpu.programs import encode_chunks, encode_tied
from atoll.node.learning.kernels.on_gpu import EXACT, check_together, grid_of, power_of_two
from atoll.protocols.errors import TRAIN_AGAIN, Divergence
from atoll.protocols.run.arena import CHUNK
from atoll.protocols.run.payload import Layout

MOST_K = 512
"""Largest k: above it ranking by counting takes longer than the CPU's way."""
SLAB_CHUNKS = 1 << 16
"""What is launched at once: its scratch is 2.3 % of a model of a billion values at k = 64."""
_LARGEST = 2.0**64
_ROWS, _GROUP, _TIED = 4, 8, 16
_REGISTERS = 72
"""Of a thread: seven programs of 128 threads are on a multiprocessor at once, and take turns to wait."""


class EncodeArrays(NamedTuple):
    """The arrays of an encoding, float32, contiguous, on one device.

    `out` may be `local`, or `residual` if its loss at a Divergence is no loss.
    """

    out_N4096: Tensor
    residual_N4096: Tensor
    anchor_N4096: Tensor
    local_N4096: Tensor


def can_encode(layout: Layout) -> bool:
    """Whether there are kernels for this codec and k."""
    return layout.codec == "sparse2" and layout.k <= MOST_K


def blank_payload(layout: Layout, device: torch.device) -> Tensor:
    """A payload, uint8 on the device, that `encode_rows` has yet to fill."""
    payload = torch.empty(layout.size_bytes, dtype=torch.uint8, device=device)
    payload[: len(layout.header)] = torch.tensor(list(layout.header), dtype=torch.uint8, device=device)
    return payload


def is_sound(values_N4096: Tensor) -> bool:
    """Whether float32 rows can be encoded: no NaN, no magnitude from 2⁶⁴ on."""
    # NaN makes both ends NaN, and each comparison with it is false.
    low, high = torch.stack(torch.aminmax(values_N4096)).tolist()
    return bool(low > -_LARGEST and high < _LARGEST)


def encode_rows(payload: Tensor, layout: Layout, at: int, arrays: EncodeArrays, beta: float) -> None:
    """Fill the payload's chunks from `at` on with β·e + (anchor − local); what it does not send is new e in `out`.

    Raises Divergence for weights that are NaN or from 2⁶⁴ on, and for a residual that is not finite.
    """
    check_together(payload, *arrays)
    device, chunks = payload.device, len(arrays.out_N4096)
    faults = torch.zeros(2, dtype=torch.int32, device=device)
    most = min(chunks, SLAB_CHUNKS)
    # Twice k as a power of two: the search for a bar may end with more than k candidates, and a kernel's vectors
    # have lengths that are powers of two.
    scratch = torch.empty((most, 3, 2 * power_of_two(layout.k)), dtype=torch.int32, device=device)
    held = torch.empty(most, dtype=torch.int32, device=device)
    with torch.cuda.device(payload.get_device()):
        for first in range(0, chunks, most):
            slab = EncodeArrays(*(each[first : first + most] for each in arrays))
            _encode_slab(payload, layout, at + first, slab, (scratch, held, faults), beta)
    # Read once, after all launches: to wait for the device between them would leave it idle.
    unsound, infinite = faults.tolist()
    if unsound:
        raise Divergence("the pseudo-gradient holds NaN or infinity", hint=TRAIN_AGAIN)
    if infinite:
        raise Divergence("the error feedback holds NaN or infinity", hint=TRAIN_AGAIN)


def _encode_slab(
    payload: Tensor, layout: Layout, at: int, slab: EncodeArrays, own: tuple[Tensor, Tensor, Tensor], beta: float
) -> None:
    """Chunks `at …` of the payload. `own`: scratch, what is left to the second kernel, and faults."""
    scratch, held, faults = own
    chunks, k = len(slab.out_N4096), layout.k
    where = (at, chunks, *layout.offsets)
    sizes = {"k": k, "low_bits": layout.low_bits, "high_bits": layout.high_bits, "most": scratch.shape[2],
             "padded": scratch.shape[2] // 2, "group": _GROUP}  # fmt: skip
    encode_chunks[(chunks,)](
        slab.anchor_N4096, slab.local_N4096, slab.residual_N4096, slab.out_N4096, payload, scratch, held, faults,
        beta, *where, **sizes, enough=k + k // 4, rows=_ROWS, columns=CHUNK // _ROWS,
        num_warps=max(4, scratch.shape[2] // 64), maxnreg=_REGISTERS, **EXACT,
    )  # fmt: skip
    encode_tied[grid_of(chunks, _TIED)](
        slab.out_N4096, payload, scratch, held, *where, **sizes, size=CHUNK, num_warps=8, **EXACT
    )
