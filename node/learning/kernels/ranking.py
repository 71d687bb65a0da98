"""Compiled: places of a chunk whose magnitude reaches a bar, and the rank of each, as vectors.

Magnitudes are the bits of |x| as integers, which rise with |x|. No branch depends on where the values lie, but for
the words of 64 places with more than two hits: a branch that is guessed wrong costs as much as ten comparisons.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types

from atoll.node.learning.kernels.compiled import Ints32, Made, in_llvm, inlined
from atoll.protocols.run.arena import CHUNK

MAX_CANDIDATES = 512
LANES = 16
"""Keys that are ranked at once."""
_WORD_PLACES = 64
_MAGNITUDE = 0x7FFFFFFF
_INT, _WORD = ir.IntType(32), ir.IntType(64)
_KEYS, _PLACES = ir.VectorType(_INT, LANES), ir.VectorType(_INT, _WORD_PLACES)


def _pointer(context: Any, builder: Any, signature: Any, args: Any, number: int, at: Any, to: Any) -> Any:
    """Pointer to a `to` at place `at` of an argument that is an int32 array."""
    array = context.make_array(signature.args[number])(context, builder, args[number])
    place = cgutils.get_item_pointer(context, builder, signature.args[number], array, (at,))
    return builder.bitcast(place, to.as_pointer())


def _copies(builder: Any, value: Any, vector: Any) -> Any:
    nothing = ir.Constant(vector, ir.Undefined)
    zeros = ir.Constant(ir.VectorType(_INT, vector.count), [0] * vector.count)
    return builder.shuffle_vector(builder.insert_element(nothing, value, _INT(0)), nothing, zeros)


@in_llvm
def _reached(_: Any, bits: Any, first: Any, bar: Any) -> Made:
    """One bit for each of 64 values from `first` on: whether its magnitude is `bar` or more."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = builder.load(_pointer(context, builder, signature, args, 0, args[1], _PLACES), align=4)
        sizes = builder.and_(values, ir.Constant(_PLACES, [_MAGNITUDE] * _WORD_PLACES))
        return builder.bitcast(builder.icmp_signed(">=", sizes, _copies(builder, args[2], _PLACES)), _WORD)

    return types.uint64(bits, types.uint64, types.int32), code


@in_llvm
def _lowest(_: Any, word: Any) -> Made:
    """Number of the lowest set bit; 64 if there is none."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), code


@in_llvm
def _rank_keys(_: Any, rank: Any, key: Any, count: Any) -> Made:
    """rank[i] ← number of keys above key i, and of equal ones before it. `count`: a multiple of LANES."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def keys(at: Any, to: Any) -> Any:
            return _pointer(context, builder, signature, args, 1, at, to)

        above = cgutils.alloca_once(builder, _KEYS)

        def compare(start: Any, stop: Any, bar: Any, at: Any = None) -> None:
            with cgutils.for_range_slice(builder, start, stop, _WORD(1), inc=True) as (j, _):
                key = _copies(builder, builder.load(keys(j, _INT)), _KEYS)
                if at is not None:  # j is one of the lanes: one less only for those after it
                    lane = _copies(builder, builder.trunc(builder.sub(j, at), _INT), _KEYS)
                    after = builder.icmp_signed(">", ir.Constant(_KEYS, list(range(LANES))), lane)
                    bar = builder.add(bar, builder.sext(after, _KEYS))
                larger = builder.sext(builder.icmp_signed(">", key, bar), _KEYS)
                builder.store(builder.sub(builder.load(above), larger), above)

        with cgutils.for_range_slice(builder, _WORD(0), args[2], _WORD(LANES), inc=True) as (at, _):
            own, end = builder.load(keys(at, _KEYS), align=4), builder.add(at, _WORD(LANES))
            # Keys are whole numbers: j counts before i where key j is above key i − 1, which is equal or larger.
            less = builder.sub(own, ir.Constant(_KEYS, [1] * LANES))

            builder.store(ir.Constant(_KEYS, [0] * LANES), above)
            compare(_WORD(0), at, less)
            compare(at, end, own, at)
            compare(end, args[2], own)
            ranks = _pointer(context, builder, signature, args, 0, at, _KEYS)
            builder.store(builder.load(above), ranks, align=4)
        return context.get_dummy_value()

    return types.void(rank, key, types.int64), code


@inlined
def candidates(bits: Ints32, bar: int, at: Ints32, key: Ints32) -> int:
    """Places and magnitudes that reach `bar`, by rising place; their number, or -1 where it is too large.

    `at` and `key` have room for a chunk and one more.
    """
    least, found = np.int32(bar), np.uint64(0)
    none, one = np.uint64(0), np.uint64(1)
    for w in range(CHUNK // _WORD_PLACES):
        first = np.int32(_WORD_PLACES * w)
        word = _reached(bits, np.uint64(_WORD_PLACES * w), least)
        # Two places are written whatever is set, and only the count depends on the bits.
        for _ in range(2):
            at[found] = first + np.int32(_lowest(word))
            found += np.uint64(word != none)
            word &= word - one
        while word:
            at[found] = first + np.int32(_lowest(word))
            found += one
            word &= word - one
    if found > np.uint64(MAX_CANDIDATES):
        return -1
    for i in range(found):
        key[i] = bits[np.uint32(at[i])] & np.int32(_MAGNITUDE)
    return int(found)


@inlined
def keep_best(found: int, k: int, at: Ints32, key: Ints32, order: Ints32, rank: Ints32) -> None:
    """Leave the k best of the candidates in `at` and `key`; `order[1:]` becomes their keys, rising."""
    padded = (found + LANES - 1) // LANES * LANES
    for i in range(found, padded):
        key[i] = -1  # below every key
    _rank_keys(rank, key, padded)
    kept, last = np.uint64(0), np.int32(k - 1)
    for i in range(found):
        place, size = rank[i], key[i]
        at[kept] = at[i]
        key[kept] = size
        # what is not chosen goes to the first place, which is waste
        order[np.uint32(max(last - place, np.int32(-1)) + 1)] = size
        kept += np.uint64(place <= last)
