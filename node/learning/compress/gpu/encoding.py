"""On a GPU: β·e + (anchor − local) -> payload and new e in one pass over the three arrays; codec `sparse2`.

The bytes and the e are those of `compress.encoding`. Where the new e goes to another array than e, a Divergence
leaves e as it was and nothing is read twice. A worker saves the memory of that array: it asks `is_sound` before.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from atoll.node.learning.compress.gpu.choosing import choose, keep_best
from atoll.node.learning.compress.gpu.fitting import fit
from atoll.node.learning.compress.gpu.packing import pack, subtract_sent
from atoll.node.learning.kernels.on_gpu import EXACT, check_together, grid_of, power_of_two
from atoll.protocols.errors import TRAIN_AGAIN, Divergence
from atoll.protocols.run.arena import CHUNK
from atoll.protocols.run.payload import Layout

MOST_K = 512
"""Largest k: above it ranking by counting takes longer than the CPU's way."""
SLAB_CHUNKS = 1 << 16
"""What is launched at once: its scratch is 2.6 % of a model of a billion values at k = 64."""
_LARGEST = 2.0**64
_LANES, _BLOCK, _GROUP = 128, 1024, 16


class EncodeArrays(NamedTuple):
    """The arrays of an encoding, float32, contiguous, on one device.

    `out` may be `local`, or `residual` if its loss at a Divergence is no loss.
    """

    out_N4096: Tensor
    residual_N4096: Tensor
    anchor_N4096: Tensor
    local_N4096: Tensor


class _Chosen(NamedTuple):
    """Scratch of a slab of N chunks."""

    held_N: Tensor
    some_place_NM: Tensor
    some_value_NM: Tensor
    """Candidates, of which there are a few more than k."""
    place_Nk: Tensor
    value_Nk: Tensor
    order_kN: Tensor
    word_N: Tensor
    bar_N: Tensor
    code_Nk: Tensor
    unary_Nb: Tensor


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
    faults = torch.zeros(2, dtype=torch.int32, device=payload.device)
    chunks = len(arrays.out_N4096)
    scratch = _scratch_for(layout, min(chunks, SLAB_CHUNKS), payload.device)
    with torch.cuda.device(payload.get_device()):
        for first in range(0, chunks, SLAB_CHUNKS):
            size = min(SLAB_CHUNKS, chunks - first)
            _choose_and_fit(arrays, scratch, faults, beta, first, size, layout.k)
            _subtract_and_pack(arrays.out_N4096, payload, scratch, layout, at=at, first=first, chunks=size)
    # Read once, after all launches: to wait for the device at each slab would leave it idle between them.
    unsound, infinite = faults.tolist()
    if unsound:
        raise Divergence("the pseudo-gradient holds NaN or infinity", hint=TRAIN_AGAIN)
    if infinite:
        raise Divergence("the error feedback holds NaN or infinity", hint=TRAIN_AGAIN)


def _scratch_for(layout: Layout, chunks: int, device: torch.device) -> _Chosen:
    def blank(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    # Twice k as a power of two: the search for a bar may end with more than k candidates, and a kernel's vectors
    # have lengths that are powers of two.
    k, most, small = layout.k, 2 * power_of_two(layout.k), torch.uint8
    return _Chosen(
        held_N=blank(chunks),
        some_place_NM=blank(chunks, most),
        some_value_NM=blank(chunks, most, dtype=torch.float32),
        place_Nk=blank(chunks, k),
        value_Nk=blank(chunks, k, dtype=torch.float32),
        # by rank first, so that neighbouring lanes of `fit` read neighbouring words
        order_kN=blank(k, chunks),
        word_N=blank(chunks),
        bar_N=blank(chunks),
        code_Nk=blank(chunks, k, dtype=small),
        unary_Nb=blank(chunks, layout.high_bits, dtype=small),
    )


def _choose_and_fit(
    arrays: EncodeArrays, own: _Chosen, faults: Tensor, beta: float, first: int, chunks: int, k: int
) -> None:
    most = own.some_place_NM.shape[1]
    some = own.held_N, own.some_place_NM, own.some_value_NM
    choose[(chunks,)](
        arrays.anchor_N4096, arrays.local_N4096, arrays.residual_N4096, arrays.out_N4096,
        *some, faults, beta, first, k=k, most=most, size=CHUNK, num_warps=8, **EXACT,
    )  # fmt: skip
    keep_best[(chunks,)](
        *some, own.place_Nk, own.value_Nk, own.order_kN, chunks,
        k=k, most=most, group=_GROUP, num_warps=max(1, most // 128), **EXACT,
    )  # fmt: skip
    fit[grid_of(chunks, _LANES)](
        own.order_kN, own.word_N, own.bar_N, chunks, k=k, lanes=_LANES, num_warps=4, **EXACT
    )


def _subtract_and_pack(
    out: Tensor, payload: Tensor, own: _Chosen, layout: Layout, *, at: int, first: int, chunks: int
) -> None:
    """Codes of a slab of `chunks` chunks, which is `first` in `out`, and its rows in all sections of the payload.

    `at`: chunk of the payload where `out` begins.
    """
    k, low_bits, high_bits = layout.k, layout.low_bits, layout.high_bits
    # only the set bits are stored
    own.unary_Nb.zero_()
    subtract_sent[grid_of(chunks * k, _BLOCK)](
        out, own.place_Nk, own.value_Nk, own.word_N, own.bar_N, own.code_Nk, own.unary_Nb, first, chunks,
        k=k, low_bits=low_bits, high_bits=high_bits, size=CHUNK, block=_BLOCK, **EXACT,
    )  # fmt: skip
    shapes = ((own.word_N, 1, 16), (own.place_Nk, k, low_bits), (own.unary_Nb, high_bits, 1), (own.code_Nk, k, 2))
    for (source, fields, width), start, row in zip(shapes, layout.offsets, layout.row_bytes, strict=True):
        section = payload[start + (at + first) * row : start + (at + first + chunks) * row]
        pack[grid_of(len(section), _BLOCK)](
            source, section, chunks, fields=fields, width=width, row_bytes=row, block=_BLOCK, **EXACT
        )
