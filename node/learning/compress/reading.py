"""Compiled: the bit fields and the unary indices of one chunk of one payload into integer arrays.

Payloads lie as rows of one array with SPARE bytes behind each, so that eight bytes can be read at any place of
a row. All indices are unsigned: signed ones cost a test each.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types

from atoll.node.learning.kernels.compiled import Bytes, Ints32, Made, Marks, in_llvm, inlined
from atoll.protocols.run.arena import CHUNK
from atoll.protocols.run.payload import Layout

SPARE = 8
"""Bytes behind each payload, so that the last field of a row can be read as eight bytes too."""
_SET_BITS = np.array(
    [([bit for bit in range(8) if byte >> bit & 1] + [0] * 8)[:8] for byte in range(256)], np.int32
)
_BIT_COUNT = np.array([byte.bit_count() for byte in range(256)], np.uint64)
_INTS, _WORDS = ir.VectorType(ir.IntType(32), 8), ir.VectorType(ir.IntType(64), 8)


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


def _eight(context: Any, builder: Any, signature: Any, args: Any, number: int, *index: Any) -> Any:
    """Pointer to eight int32 of an array."""
    array = context.make_array(signature.args[number])(context, builder, args[number])
    place = cgutils.get_item_pointer(context, builder, signature.args[number], array, index)
    return builder.bitcast(place, _INTS.as_pointer())


def _copies(builder: Any, value: Any, vector: Any) -> Any:
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.IntType(32)(0))
    nothing = ir.Constant(vector, ir.Undefined)
    return builder.shuffle_vector(one, nothing, ir.Constant(_INTS, [0] * 8))


# Written as vectors: the compiler makes eight scalar stores of the loops in Python, three times as slow.
@in_llvm
def _spread(_: Any, place: Any, found: Any, table: Any, byte: Any, start: Any) -> Made:
    """place[found + t] ← start + table[byte, t], t < 8; all int32."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.load(_eight(context, builder, signature, args, 2, args[3], ir.IntType(64)(0)), align=4)
        places = builder.add(bits, _copies(builder, args[4], _INTS))
        builder.store(places, _eight(context, builder, signature, args, 0, args[1]), align=4)
        return context.get_dummy_value()

    return types.void(place, types.uint64, table, types.uint64, types.int32), code


@in_llvm
def _split(_: Any, out: Any, first: Any, held: Any, width: Any) -> Made:
    """out[first + j] ← field j of eight fields of `width` bits in the 64 of `held`."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width = _copies(builder, args[3], _WORDS)
        shifts = builder.mul(width, ir.Constant(_WORDS, list(range(8))))
        mask = builder.sub(builder.shl(ir.Constant(_WORDS, [1] * 8), width), ir.Constant(_WORDS, [1] * 8))
        fields = builder.and_(builder.lshr(_copies(builder, args[2], _WORDS), shifts), mask)
        builder.store(builder.trunc(fields, _INTS), _eight(context, builder, signature, args, 0, args[1]), align=4)
        return context.get_dummy_value()

    return types.void(out, types.uint64, types.uint64, types.uint64), code


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
            _split(out, np.uint64(8 * g), eight_bytes(rows, p, at + np.uint64(g) * step), step)
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
        byte = np.uint64(rows[p, at + np.uint64(b)])
        # All eight places are written, from a table, and only the count depends on the bits: no branch to guess.
        _spread(place, found, _SET_BITS, byte, np.int32(8 * b))
        found += _BIT_COUNT[byte]
    return found


@inlined
def join_parts(place: Ints32, low: Marks, k: int, low_bits: int) -> None:
    """Indices of the chunk into `low`, of unary places and low bits."""
    # The i-th set bit is bit high_i + i, so set bits are distinct where the high parts of indices are equal.
    for i in range(k):
        low[i] |= np.uint32((place[i] - np.int32(i)) << np.int32(low_bits))


@inlined
def rises(low: Marks, k: int) -> bool:
    """Whether indices rise within the chunk."""
    # A loop of its own, later: loads at i − 1 would wait for the vectors that `join_parts` stores.
    rising = np.uint32(1)
    for i in range(1, k):
        rising &= np.uint32(low[i] > low[i - 1])
    # Rising ones are bounded by the last: this comparison keeps every later access inside the chunk.
    return bool(rising) and low[k - 1] < np.uint32(CHUNK)
