"""Compiled: the bit fields and the unary indices of one chunk of one payload into integer arrays.

Payloads lie as rows of one array with SPARE bytes behind each, so that eight bytes can be read at any place of
a row. All indices are unsigned: signed ones cost a test each.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from atoll.node.learning.kernels.compiled import inlined
from atoll.protocols.run.arena import CHUNK

Bytes = npt.NDArray[np.uint8]
Ints32 = npt.NDArray[np.int32]
Marks = npt.NDArray[np.uint32]

SPARE = 8
_SET_BITS = np.array(
    [([bit for bit in range(8) if byte >> bit & 1] + [0] * 8)[:8] for byte in range(256)], np.int32
)
_BIT_COUNT = np.array([byte.bit_count() for byte in range(256)], np.uint64)


@inlined
def eight_bytes(rows: Bytes, p: int, at: Any) -> Any:
    """Little endian; the compiler makes one load of it."""
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
        for t in range(8):
            place[found + np.uint64(t)] = start + _SET_BITS[byte, t]
        found += _BIT_COUNT[byte]
    return found


@inlined
def join_parts(place: Ints32, low: Marks, k: int, low_bits: int) -> bool:
    """Indices of the chunk into `low`, of unary places and low bits; whether they rise within the chunk."""
    for i in range(k):
        low[i] |= np.uint32((place[i] - np.int32(i)) << np.int32(low_bits))
    rises = np.uint32(1)
    for i in range(1, k):
        rises &= np.uint32(low[i] > low[i - 1])
    return bool(rises) and low[k - 1] < np.uint32(CHUNK)
