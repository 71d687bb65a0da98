"""Compiled: a = β·e + (anchor − local) -> payload bytes and the new e, chunk by chunk in one pass.

A payload is filled range of chunks by range of chunks, so that the caller needs only a slab of the local weights
at a time: `is_sound` of every slab first, then `encode_rows` of every slab. The tests hold the bytes and the new e
against a plain version in torch (tests/plain).
"""

from functools import lru_cache
from threading import get_ident
from typing import Any

import numpy as np
from torch import Tensor

from atoll.node.learning.compress.blocks import (
    Blocks,
    add_up,
    are_sound,
    blocks_of_rows,
    chunks_in,
    clear_padding,
    part_of,
    row_of,
)
from atoll.node.learning.compress.dense import dense_scratch, dense_shape, encode_dense
from atoll.node.learning.compress.reading import SparseShape, sparse_shape
from atoll.node.learning.compress.selecting import (
    HIGHS,
    SHAPES,
    best_fit,
    choose,
    half_bits,
    norms_of,
    selection_scratch,
    units_of,
    word_of,
)
from atoll.node.learning.kernels.compiled import Bytes, Doubles, Floats, Ints32, compiled, inlined
from atoll.protocols.errors import TRAIN_AGAIN, Divergence
from atoll.protocols.run.arena import SIDE
from atoll.protocols.run.payload import LOW_LEVEL, VALUE_BITS, Layout

_UNIT = np.float32(2.0**-VALUE_BITS)


def blank_payload(layout: Layout) -> bytearray:
    """A payload with its header alone, zeros behind it, for `encode_rows` to fill."""
    out = bytearray(layout.size_bytes)
    out[: len(layout.header)] = layout.header
    return out


def is_sound(local: Tensor | Blocks) -> bool:
    """Whether float32 rows can be encoded: no NaN, no magnitude from 2⁶⁴ on."""
    return bool(are_sound(_blocks(local).table, np.zeros(SIDE, np.int32)))


def encode_rows(
    payload: bytearray,
    layout: Layout,
    at: int,
    residual_C4096: Tensor,
    anchor_C4096: Tensor,
    local: Tensor | Blocks,
    beta: float,
) -> None:
    """Fill the payload's chunks from `at` on with β·e + (anchor − local); e becomes what was not sent.

    All three are float32, contiguous and sound (`is_sound`): only then is nothing lost. Local weights may be rows
    `[C, 4096]`, as many as e and the anchor have. Given as blocks, which name rows of both, they become the anchor
    in the same pass, and e has no padding. Calls for other chunks of the same payload may run at the same time.
    Raises Divergence for a residual that is not finite.
    """
    in_place = isinstance(local, Blocks)
    arrays = (anchor_C4096.numpy(), _blocks(local).table, in_place, residual_C4096.numpy())
    if not _run(layout, arrays, np.float32(beta), at, np.frombuffer(payload, np.uint8)):
        raise Divergence("the error feedback holds NaN or infinity", hint=TRAIN_AGAIN)


def encode_residual(
    residual_C4096: Tensor, anchor_C4096: Tensor, local_C4096: Tensor, beta: float, layout: Layout
) -> bytes:
    """Payload of β·e + (anchor − local) of whole arrays, as `encode_rows`.

    Raises Divergence for weights that are NaN or from 2⁶⁴ on, with the residual as it was.
    """
    if not is_sound(local_C4096):
        raise Divergence("the pseudo-gradient holds NaN or infinity")
    payload = blank_payload(layout)
    encode_rows(payload, layout, 0, residual_C4096, anchor_C4096, local_C4096, beta)
    return bytes(payload)


def _blocks(local: Tensor | Blocks) -> Blocks:
    return blocks_of_rows(local) if isinstance(local, Tensor) else local


def _run(layout: Layout, arrays: tuple[Any, Any, bool, Any], beta: Any, at: int, out: Bytes) -> bool:
    """Encode by the layout's codec; whether everything was finite."""
    if layout.is_dense:
        shape = dense_shape(layout)
        return bool(encode_dense(*arrays, beta, at, out, shape, dense_scratch(shape.block)))
    return bool(_encode_chunks(*arrays, beta, at, out, *_plan_of(layout), encode_scratch(layout.k, get_ident())))


@lru_cache(maxsize=8)
def _plan_of(layout: Layout) -> tuple[tuple[int, ...], SparseShape, Doubles]:
    """What a sparse layout's encoder is given; a share of a mixture is many calls for one payload."""
    return layout.offsets, sparse_shape(layout), norms_of(layout.k)


@lru_cache(maxsize=16)
def encode_scratch(k: int, thread: int) -> Any:
    """Arrays that the encoder works in; each thread, by its number, has its own."""
    del thread
    # eight codes more than k: the last byte of codes is packed from a whole group, and what is behind k stays 0
    fit = (np.empty(k), np.empty((SHAPES, k)), np.empty(1, np.float32), np.zeros(k + 8, np.uint8))
    return selection_scratch(k), fit


@compiled
def _encode_chunks(
    anchor: Any,
    local: Any,
    in_place: bool,
    residual: Any,
    beta: Any,
    first: int,
    out: Bytes,
    offsets: tuple[int, ...],
    shape: Any,
    norms: Doubles,
    scratch: Any,
) -> bool:
    """Encode chunks `first …` of a sparse payload into `out`; e becomes the rest. False where a was not finite.

    `in_place`: the anchor becomes the local weights, and padding of e zero.
    """
    k = shape.k
    chosen, (small, gain, single, code) = scratch
    at, key, order = chosen[1], chosen[2], chosen[3]
    sizes = order[1:].view(np.float32)
    # The bar of one chunk is where the search for the next one begins: neighbours have values of one scale.
    guess = part = 0
    for at_chunk in range(chunks_in(local)):
        c, part = first + at_chunk, part_of(local, part, at_chunk)
        row = row_of(local[part], at_chunk)
        e = residual[row]
        add_up(e, anchor[row], local[part], at_chunk, beta, in_place)
        guess = choose(e.view(np.int32), k, guess, chosen)
        if guess < 0:
            return False
        # float64 in rising order of size: the order is part of the answer, here and in the GPU's kernels.
        total = 0.0
        for i in range(k):
            total += np.float64(sizes[i])
            small[i] = total
        if shape.code_bits == 2:
            form, split, scale = best_fit(small, norms, gain)
        else:
            form, split, scale = 0, k - 1, total / k
        half = half_bits(scale, single)
        any_large = _subtract_sent(e, at, key, code, half, form, order[split + 1], k)
        word = word_of(half, form, any_large)
        out[offsets[0] + 2 * c] = word & 255
        out[offsets[0] + 2 * c + 1] = word >> 8
        pack_chunk(out, c, at, code, offsets, shape)
        if in_place:
            clear_padding(local[part], at_chunk, e)
    return True


@inlined
def _subtract_sent(
    e: Floats, at: Ints32, key: Ints32, code: Bytes, half: int, form: int, bar: int, k: int
) -> bool:
    """Codes of the chosen values; what they send leaves e. Whether any is large. Scale 0 sends nothing."""
    # Values too small for the smallest scale: the chunk has the one form that readers take for "nothing".
    if half == 0:
        for i in range(k):
            at[i] = i
            code[i] = 0
        return False
    units = units_of(half)
    low = np.float32(units * LOW_LEVEL) * _UNIT
    high = np.float32(units * HIGHS[form]) * _UNIT
    # Large is decided by the bits of |x|, not by a division: the split is exact where values are equal.
    any_large = False
    most = np.int32(bar)
    bits = e.view(np.int32)
    for i in range(k):
        place = np.uint32(at[i])
        large = key[i] > most
        any_large |= large
        negative = np.uint8(bits[place] < 0)
        size = high if large else low
        code[i] = np.uint8(large) | np.uint8(negative << 1)
        e[place] -= -size if negative else size
    return any_large


@inlined
def pack_chunk(out: Bytes, c: int, at: Ints32, code: Bytes, offsets: Any, shape: Any) -> None:
    """Write lows, highs and codes of one chunk; `code` has eight zeros behind the k codes."""
    k, low_bits, codes = shape.k, shape.low_bits, shape.code_bytes
    width, lows, highs = np.uint64(low_bits), shape.low_bytes, shape.high_bytes
    # `out` holds zeros: fields are written whole, the unary bits are or-ed in.
    spot = np.uint64(offsets[1] + c * lows)
    held, have, one, eight = np.uint64(0), np.uint64(0), np.uint64(1), np.uint64(8)
    mask = np.int32((1 << low_bits) - 1)
    for i in range(k):
        held |= np.uint64(at[i] & mask) << have
        have += width
        while have >= eight:
            out[spot] = np.uint8(held)
            spot, held, have = spot + one, held >> eight, have - eight
    if have:
        out[spot] = np.uint8(held)
    row = out[offsets[2] + c * highs : offsets[2] + (c + 1) * highs]
    for i in range(k):
        bit = np.uint32((at[i] >> low_bits) + np.int32(i))
        row[bit >> np.uint32(3)] |= np.uint8(np.uint32(1) << (bit & np.uint32(7)))
    row = out[offsets[3] + c * codes : offsets[3] + (c + 1) * codes]
    if shape.code_bits == 2:
        for i in range(codes):
            four = code[4 * i : 4 * i + 4]
            row[i] = four[0] | (four[1] << 2) | (four[2] << 4) | (four[3] << 6)
    else:
        for i in range(codes):
            byte = 0
            for j in range(8):
                byte |= (code[8 * i + j] >> 1) << j
            row[i] = byte
