"""Compiled: R payloads of `sparse2` or `sparse1` are decoded, or folded into θ + U; every rule is held.

A payload is judged while it is read, chunk by chunk, so legal bytes are the only ones that reach a sum.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from atoll.node.learning.compress.reading import join_parts, padding_is_zero, read_fields, read_unary, rises
from atoll.node.learning.compress.selecting import units_of
from atoll.node.learning.compress.summing import (
    MAX_PACKED_WEIGHT,
    add_row,
    clipped,
    find_members,
    finish_chunk,
    least_weight,
    packed,
    spill,
)
from atoll.node.learning.kernels.compiled import Ints, Ints32, Marks, add_to, compiled, fence, inlined
from atoll.node.learning.outer.rules.landing import land
from atoll.protocols.run.arena import CHUNK
from atoll.protocols.run.payload import HIGH_LEVELS, LOW_LEVEL, ONE_FP16, SCALE_MASK, SHAPE_SHIFT, Layout

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
HIGHS = np.array(HIGH_LEVELS, np.int64)
"""Large level by shape."""
_GROUP = 8
"""Payloads that are read before any is added: what one step stores the next one loads much later."""


def sparse_scratch(layout: Layout, members: int) -> tuple[npt.NDArray[Any], ...]:
    """Arrays that the kernels of this module work in; each thread needs its own."""
    return (
        np.empty((2, members), np.int64),
        # read_unary writes eight places for every byte of the row, whatever is set in it
        np.empty((_GROUP, 8 * layout.row_bytes[2] + 16), np.int32),
        np.zeros((_GROUP, layout.k + 16), np.uint32),
        np.zeros((_GROUP, layout.k + 16), np.uint32),
        np.empty(_GROUP, np.int64),
        np.empty(4, np.int64),
        np.zeros(CHUNK, np.int64),
        np.zeros((2, CHUNK), np.int64),
        # one place more than a chunk has: a place is written first and counted after
        np.empty(CHUNK + 1, np.uint32),
        np.empty((2, CHUNK + 1), np.int64),
        np.zeros(CHUNK, np.int32),
    )


@compiled
def fold_sparse(
    payloads: Any, span: tuple[int, int], shape: Any, step: tuple[int, int], landing: Any,
    theta: Any, out: Any, scratch: Any,
) -> int:  # fmt: skip
    """θ + U of chunks `span` into `out`; 0, or a fault's number. With an empty `out` payloads are only checked.

    `payloads`: `folding.PayloadArrays`. `step`: α_256 and floor_256. `landing`: what of `outer.rules` follows.
    """
    weights = payloads.weight_PA
    alpha_256, floor_256 = step
    there, place, low, code, word, value, sums, wide, touched, total, moves = scratch
    for c in range(span[0], span[1]):
        count, weight, spilt = np.uint64(0), 0, False
        members, atom = find_members(c, payloads, there), payloads.atom_C[c]
        for first in range(0, members, _GROUP):
            group = min(_GROUP, members - first)
            fault = read_group(payloads, first, group, there, shape, word, place, low, code)
            if fault:
                return fault
            for g in range(group if len(out) else 0):
                p = there[0, first + g]
                unit, own_weight = clipped(units_of(word[g] & SCALE_MASK), payloads, p, c), weights[p, atom]
                # Nothing sent, or nothing of it left: its weight does not count in the mean of its places.
                if unit and own_weight:
                    weight += own_weight
                    # One more member would carry into the sum's bits: what is there goes to the wide arrays first.
                    if weight > MAX_PACKED_WEIGHT:
                        spill(sums, wide[0], wide[1])
                        count, weight, spilt = np.uint64(0), own_weight, True
                    _values(value, word[g] >> SHAPE_SHIFT, unit * own_weight, own_weight, shape.code_bits)
                    count = add_row(sums, touched, count, low[g], code[g], value, shape.k)
        if len(out):
            rule = alpha_256, least_weight(payloads, c, there, members, floor_256)
            finish_chunk(sums, wide, touched, total, moves, (count, spilt), rule)
            fits = land(landing, out, theta, moves, c) if landing.kind else add_to(out, theta, moves, c)
            if not fits:
                return LEFT_RANGE
    # Streaming stores are not ordered with others: the caller's thread must see them before it sees us end.
    fence()
    return 0


@compiled
def decode_sparse(payloads: Any, shape: Any, index: Ints, q: Ints, scratch: Any) -> int:
    """Indices and values (2⁻²⁶) `[C, k]` of one payload, which has all chunks; 0, or the number of a fault."""
    there, place, low, code, word, _, _, _, _, _, _ = scratch
    for c in range(len(index)):
        find_members(c, payloads, there)
        fault = read_group(payloads, 0, 1, there, shape, word, place, low, code)
        if fault:
            return fault
        units = units_of(word[0] & SCALE_MASK)
        for i in range(shape.k):
            # `sparse1` writes only the sign bit, which is bit 1 of a code of `sparse2`
            kind = code[0, i] << np.uint32(2 - shape.code_bits)
            level = HIGHS[word[0] >> SHAPE_SHIFT] if kind & np.uint32(1) else LOW_LEVEL
            size = np.int64(level * units)
            index[c, i] = low[0, i]
            q[c, i] = -size if kind & np.uint32(2) else size
    return 0


@inlined
def read_group(
    payloads: Any, first: int, group: int, there: Ints, shape: Any,
    word: Ints, place: Ints32, low: Marks, code: Marks,
) -> int:  # fmt: skip
    """Words, indices (into `low`) and codes of one chunk of a group of payloads; 0, or the number of a fault."""
    rows, offsets = payloads.bytes_PB, payloads.offset_PS
    for g in range(group):
        p, r = there[0, first + g], there[1, first + g]
        # unsigned, because a signed index costs a test for negative ones at every access
        at_word = np.uint64(offsets[p, 0] + r * shape.word_bytes)
        at_low = np.uint64(offsets[p, 1] + r * shape.low_bytes)
        at_high = np.uint64(offsets[p, 2] + r * shape.high_bytes)
        at_code = np.uint64(offsets[p, 3] + r * shape.code_bytes)
        word[g] = np.int64(rows[p, at_word]) | (np.int64(rows[p, at_word + np.uint64(1)]) << 8)
        found = read_unary(rows, p, at_high, shape.high_bytes, place[g])
        whole = read_fields(rows, p, at_low, low[g], shape.k, shape.low_bits)
        whole &= read_fields(rows, p, at_code, code[g], shape.k, shape.code_bits)
        if not (whole and padding_is_zero(rows, p, at_high, shape.high_bits)):
            return 6
        # checked before anything uses `place`, whose first k entries are otherwise of an earlier chunk
        if found != np.uint64(shape.k):
            return 2
    for g in range(group):
        join_parts(place[g], low[g], shape.k, shape.low_bits)
    for g in range(group):
        if not rises(low[g], shape.k):
            return 3
    for g in range(group):
        fault = _judge(word[g], low[g], code[g], shape.k, shape.code_bits)
        if fault:
            return fault
    return 0


@inlined
def _judge(word: int, place: Marks, code: Marks, k: int, width: int) -> int:
    """0 where word and codes are the one form of what they say, else the number of a fault."""
    # The shape lies in the sign bit and the top exponent bit of the fp16, which a scale of at most 1 never sets.
    scale = word & SCALE_MASK
    if scale > ONE_FP16:
        return 1
    used, every = np.uint32(0), np.uint32(3)
    for i in range(k):
        used |= code[i]
        every &= code[i]
    if width == 1 and word >> SHAPE_SHIFT:
        return 4
    # Refused as second forms of other payloads: all large is all small at a larger scale, and without a large
    # value every shape means the same.
    if width == 2 and (every & np.uint32(1) or (not used & np.uint32(1) and word >> SHAPE_SHIFT)):
        return 4
    # k rising places of which the last is k − 1 are 0 … k − 1
    if scale == 0 and (used or place[k - 1] != np.uint32(k - 1)):
        return 5
    return 0


@inlined
def _values(value: Ints, shape: int, unit: int, weight: int, width: int) -> None:
    """What each of the four codes adds to a place, packed with the weight; `unit` is of all the weight."""
    small, large = unit * LOW_LEVEL, unit * HIGHS[shape]
    # a code of `sparse1` is the sign alone: its code 1 is a small negative value
    value[0] = packed(small, weight)
    value[1] = packed(large if width == 2 else -small, weight)
    value[2] = packed(-small, weight)
    value[3] = packed(-large, weight)
