"""Compiled: the bit fields and the unary indices of one chunk of one payload into integer arrays.

Payloads lie as rows of one array with SPARE bytes behind each, so that eight bytes can be read at any place of
a row. All indices are unsigned: signed ones cost a test each.
"""

from typing import Any, NamedTuple

import numpy as np

from atoll.node.learning.kernels.compiled import Bytes, Ints32, Marks, inlined
from atoll.protocols.run.arena import CHUNK
from atoll.protocols.run.payload import Layout

SPARE = 8
"""Bytes behind each payload, so that the last field of a row can be read as eight bytes too."""
_SET_BITS = np.array(
    [([bit for bit in range(8) if byte >> bit & 1] + [0] * 8)[:8] for byte in range(256)], np.int32
)
_BIT_COUNT = np.array([byte.bit_count() for byte in range(256)], np.uint64)


class SparseShape(NamedTuple):
    """Layout of a sparse payload for the kernels: bits of each field, bytes of a chunk's row in each section."""

    k: int
    low_bits: int
    high_bits: int
    code_bits: int
    word_bytes: int
    low_bytes: int
    high_bytes: int
    code_bytes: int


def sparse_shape(layout: Layout) -> SparseShape:
    """The shape of a layout of `sparse2` or `sparse1`."""
    return SparseShape(layout.k, layout.low_bits, layout.high_bits, layout.code_bits, *layout.row_bytes)


@inlined
def eight_bytes(rows: Bytes, p: int, at: Any) -> Any:
    """Eight bytes from `at` on as a little-endian number; the compiler makes one load of it."""
    return (
        np.uint64(rows[p, at])
        | (np.uint64(rows[p, at + np.uint64(1)]) << np.uint64(8))
        | (np.uint64(rows[p, at + np.uint64(2)]) << np.uint64(16))
        | (np.uint64(rows[p, at + np.uint64(3)]) << np.uint64(24))
        | (np.uint64(rows[p, at + np.uint64(4)]) << np.uint64(32))
        | (np.uint64(rows[p, at + np.uint64(5)]) << np.uint64(40))
        | (np.uint64(rows[p, at + np.uint64(6)]) << np.uint64(48))
        | (np.uint64(rows[p, at + np.uint64(7)]) << np.uint64(56))
    )


@inlined
def read_fields(rows: Bytes, p: int, at: Any, out: Marks, k: int, width: int) -> bool:
    """k fields of `width` bits (≤ 12) into `out`, which has room for 8 more; whether the padding is zero."""
    mask, step = np.uint64((1 << width) - 1), np.uint64(width)
    # Eight fields of up to 8 bits are one load of 64; wider ones are loaded one by one.
    if width <= 8:
        for g in range((k + 7) >> 3):
            held = eight_bytes(rows, p, at + np.uint64(g) * step)
            first = np.uint64(8 * g)
            for j in range(8):
                out[first + np.uint64(j)] = np.uint32((held >> (step * np.uint64(j))) & mask)
    else:
        for i in range(k):
            bit = np.uint64(i) * step
            held = eight_bytes(rows, p, at + (bit >> np.uint64(3)))
            out[i] = np.uint32((held >> (bit & np.uint64(7))) & mask)
    return padding_is_zero(rows, p, at, k * width)


@inlined
def padding_is_zero(rows: Bytes, p: int, at: Any, bits: int) -> bool:
    """Whether the last byte of a section of `bits` bits has nothing behind them."""
    over = np.uint32(bits & 7)
    return bool(over == 0 or rows[p, at + np.uint64(bits >> 3)] >> over == 0)


@inlined
def read_unary(rows: Bytes, p: int, at: Any, row_bytes: int, place: Ints32) -> Any:
    """Numbers of the set bits into `place`, which has room for all bits and 8 more; how many there are."""
    found = np.uint64(0)
    for b in range(row_bytes):
        byte = np.uint32(rows[p, at + np.uint64(b)])
        start = np.int32(8 * b)
        # All eight places are written, from a table, and only the count depends on the bits: no branch to guess.
        for t in range(8):
            place[found + np.uint64(t)] = start + _SET_BITS[byte, t]
        found += _BIT_COUNT[byte]
    return found


@inlined
def join_parts(place: Ints32, low: Marks, k: int, low_bits: int) -> bool:
    """Indices of the chunk into `low`, of unary places and low bits; whether they rise within the chunk."""
    # The i-th set bit is bit high_i + i, so set bits are distinct where the high parts of indices are equal.
    for i in range(k):
        low[i] |= np.uint32((place[i] - np.int32(i)) << np.int32(low_bits))
    rises = np.uint32(1)
    for i in range(1, k):
        rises &= np.uint32(low[i] > low[i - 1])
    # Rising ones are bounded by the last: this comparison keeps every later access inside the chunk.
    return bool(rises) and low[k - 1] < np.uint32(CHUNK)
