"""Compiled: R payloads of `sparse2` or `sparse1` -> the outer step; every rule of the wire is held."""

from typing import Any

import numpy as np
import numpy.typing as npt

from atoll.node.learning.compress.fitting import units_of
from atoll.node.learning.compress.reading import join_parts, padding_is_zero, read_fields, read_unary
from atoll.node.learning.compress.summing import (
    MOST_WEIGHT,
    add_row,
    divide,
    least_weight,
    packed,
    spill,
    spread,
    take,
    take_wide,
    who_covers,
)
from atoll.node.learning.kernels.compiled import compiled, inlined
from atoll.node.learning.kernels.streaming import add_to, settle
from atoll.protocols.run.arena import CHUNK
from atoll.protocols.run.payload import (
    HIGH_LEVELS,
    LOW_LEVEL,
    ONE_FP16,
    SCALE_MASK,
    SHAPE_SHIFT,
    VALUE_BITS,
    Layout,
)

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]
Marks = npt.NDArray[np.uint32]

FAULTS = (
    "",
    "a scale above 1",
    "a chunk does not have k indices",
    "indices do not rise within the chunk",
    "a chunk without small values, or a shape that nothing uses",
    "a chunk of scale 0 is not in its one form",
    "padding bits are not zero",
)
LEFT_RANGE = len(FAULTS)
"""Not a fault of a payload: θ + U does not fit."""
_HIGHS = np.array(HIGH_LEVELS, np.int64)
_UNIT = np.float32(2.0**-VALUE_BITS)
_GROUP = 8
"""Payloads that are read before they are added: what one step stores the next one reads much later."""


def sparse_facts(layout: Layout) -> tuple[int, ...]:
    """What the kernels know of a layout: k, bits of an index's two parts and of a code, and the size of rows."""
    return layout.k, layout.low_bits, layout.high_bits, layout.code_bits, *layout.row_bytes


def scratch_for(layout: Layout, members: int) -> tuple[npt.NDArray[Any], ...]:
    """What `fold_sparse` works in, one for each thread."""
    return (
        np.empty((2, members), np.int64),
        np.empty((_GROUP, 8 * layout.row_bytes[2] + 16), np.int32),
        np.zeros((_GROUP, layout.k + 16), np.uint32),
        np.zeros((_GROUP, layout.k + 16), np.uint32),
        np.empty(_GROUP, np.int64),
        np.empty(4, np.int64),
        np.zeros(CHUNK, np.int64),
        np.zeros((2, CHUNK), np.int64),
        np.empty(CHUNK + 1, np.uint32),
        np.empty((2, CHUNK + 1), np.int64),
        np.zeros(CHUNK, np.int32),
    )


@compiled
def fold_sparse(
    rows: Bytes, weights: Ints, span: tuple[int, int], facts: Any, places: Any, step: tuple[int, int],
    arrays: Any, scratch: Any,
) -> int:  # fmt: skip
    """Number of a fault, 0 for none. `arrays`: update, θ, view; fills the first and last where not empty."""
    update, theta, view = arrays
    wanted = len(update) > 0 or len(view) > 0
    k = facts[0]
    there, place, low, code, word, value, sums, wide, touched, total, moves = scratch
    for c in range(span[0], span[1]):
        count, weight, spilt = np.uint64(0), 0, False
        members = who_covers(c, places, there)
        for first in range(0, members, _GROUP):
            group = min(_GROUP, members - first)
            fault = _read(rows, first, group, there, facts, places[2], word, place, low, code)
            if fault:
                return fault
            for g in range(group if wanted else 0):
                if word[g] & SCALE_MASK:
                    mine = weights[there[0, first + g]]
                    weight += mine
                    if weight > MOST_WEIGHT:
                        spill(sums, wide[0], wide[1])
                        count, weight, spilt = np.uint64(0), mine, True
                    _values(value, word[g], mine, facts[3])
                    count = add_row(sums, touched, count, low[g], code[g], value, k)
        if wanted:
            found = int(count)
            if spilt:
                spill(sums, wide[0], wide[1])
                found = take_wide(wide[0], wide[1], touched, total[0], total[1])
            else:
                take(sums, touched, found, total[0], total[1])
            divide(total[0], total[1], found, step[0], least_weight(weights, there, members, step[1]))
            if len(update):
                _store(update[c], touched, total[0], found)
            if len(view):
                spread(moves, touched, total[0], found)
                if not add_to(view, theta, moves, c):
                    return LEFT_RANGE
    settle()
    return 0


@compiled
def add_sparse(rows: Bytes, span: tuple[int, int], facts: Any, places: Any, residual: Any, scratch: Any) -> int:
    """Add the values of one payload, which has all chunks, to `residual`; the number of a fault."""
    there, place, low, code, word, _, _, _, _, _, _ = scratch
    for c in range(span[0], span[1]):
        who_covers(c, places, there)
        fault = _read(rows, 0, 1, there, facts, places[2], word, place, low, code)
        if fault:
            return fault
        units = units_of(word[0] & SCALE_MASK)
        for i in range(facts[0] if units else 0):
            kind = code[0, i] << np.uint32(2 - facts[3])
            size = LOW_LEVEL if facts[3] == 1 or not kind & np.uint32(1) else _HIGHS[word[0] >> SHAPE_SHIFT]
            step = np.float32(size * units) * _UNIT
            residual[c, np.uint64(low[0, i])] += -step if kind & np.uint32(2) else step
    return 0


@inlined
def _read(
    rows: Bytes, first: int, group: int, there: Ints, facts: Any, offsets: Ints,
    word: Ints, place: Ints32, low: Marks, code: Marks,
) -> int:  # fmt: skip
    """Words, indices (into `low`) and codes of one chunk of a group of payloads; the number of a fault."""
    k, low_bits, high_bits, width, words, lows, highs, codes = facts
    for g in range(group):
        p, r = there[0, first + g], there[1, first + g]
        spots = (
            np.uint64(offsets[p, 0] + r * words),
            np.uint64(offsets[p, 1] + r * lows),
            np.uint64(offsets[p, 2] + r * highs),
            np.uint64(offsets[p, 3] + r * codes),
        )
        word[g] = np.int64(rows[p, spots[0]]) | (np.int64(rows[p, spots[0] + np.uint64(1)]) << 8)
        found = read_unary(rows, p, spots[2], highs, place[g])
        whole = read_fields(rows, p, spots[1], low[g], k, low_bits)
        whole &= read_fields(rows, p, spots[3], code[g], k, width)
        if not (whole and padding_is_zero(rows, p, spots[2], high_bits)):
            return 6
        if found != np.uint64(k):
            return 2
    for g in range(group):
        if not join_parts(place[g], low[g], k, low_bits):
            return 3
    for g in range(group):
        fault = _judge(word[g], low[g], code[g], k, width)
        if fault:
            return fault
    return 0


@inlined
def _judge(word: int, place: Marks, code: Marks, k: int, width: int) -> int:
    """Whether word and codes are the one form of what they say."""
    scale = word & SCALE_MASK
    if scale > ONE_FP16:
        return 1
    used, every = np.uint32(0), np.uint32(3)
    for i in range(k):
        used |= code[i]
        every &= code[i]
    if width == 1 and word >> SHAPE_SHIFT:
        return 4
    if width == 2 and (every & np.uint32(1) or (not used & np.uint32(1) and word >> SHAPE_SHIFT)):
        return 4
    # k rising places of which the last is k − 1 are 0 … k − 1
    if scale == 0 and (used or place[k - 1] != np.uint32(k - 1)):
        return 5
    return 0


@inlined
def _values(value: Ints, word: int, weight: int, width: int) -> None:
    """What each code adds to a place."""
    unit = units_of(word & SCALE_MASK) * weight
    small, large = unit * LOW_LEVEL, unit * _HIGHS[word >> SHAPE_SHIFT]
    value[0], value[1] = packed(small, weight), packed(large if width == 2 else -small, weight)
    value[2], value[3] = packed(-small, weight), packed(-large, weight)


@inlined
def _store(row: Ints32, touched: Marks, moves: Ints, count: int) -> None:
    for i in range(CHUNK):
        row[i] = 0
    for t in range(count):
        row[np.uint64(touched[t])] = moves[t]
