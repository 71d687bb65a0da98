"""Compiled: payloads of `lookup2` are decoded, measured, or folded into θ + U; every rule is held.

Each chunk has the entries of its tensor's table that it uses, so a chunk is read alone, as with every codec; a
value is a whole number, ±unit·4 in units of 2⁻²⁶. Fold and bounds of sums are those of `sparse_fold`. How tables
are made: `lookup_encoding`.
"""

from typing import Any

import numpy as np

from atoll.node.learning.compress.reading import (
    join_parts,
    padding_is_zero,
    read_fields,
    read_unary,
    rises,
)
from atoll.node.learning.compress.selecting import units_of
from atoll.node.learning.compress.summing import (
    MAX_PACKED_WEIGHT,
    clipped,
    find_members,
    finish_chunk,
    least_weight,
    packed,
    spill,
)
from atoll.node.learning.kernels.compiled import Ints, Ints32, Marks, add_to, compiled, fence, inlined
from atoll.node.learning.outer.rules.landing import land
from atoll.protocols.run.payload import LOW_LEVEL, ONE_FP16

ENTRIES = 4
FAULTS = {
    30: "a value of the table beyond its range",
    31: "a table that does not rise, or has values behind its end",
    32: "a code without a value, or a value without a code",
}
LEFT_RANGE = 33
"""Not a fault of a payload: θ + U does not fit."""
SIGN, _SIZE = 0x8000, 0x7FFF


@inlined
def signed_units(half: Any) -> Any:
    """An fp16 within −1 … 1 in units of 2⁻²⁴."""
    units = units_of(half & _SIZE)
    return -units if half & SIGN else units


@inlined
def read_chunk(
    payloads: Any, m: int, there: Ints, shape: Any, table: Ints, place: Ints32, low: Marks, code: Marks
) -> int:
    """Table (signed units), indices (into `low`) and codes of one chunk of payload `m`; 0, or a fault's number."""
    rows, offsets = payloads.bytes_PB, payloads.offset_PS
    p, r = there[0, m], there[1, m]
    at_table = offsets[p, 0] + r * shape.word_bytes
    for entry in range(ENTRIES):
        half = np.int64(rows[p, at_table + 2 * entry]) | (np.int64(rows[p, at_table + 2 * entry + 1]) << 8)
        if half & _SIZE > ONE_FP16 or half == SIGN:
            return 30
        table[entry] = signed_units(half)
    at_high = np.uint64(offsets[p, 2] + r * shape.high_bytes)
    found = read_unary(rows, p, at_high, shape.high_bytes, place)
    whole = read_fields(rows, p, np.uint64(offsets[p, 1] + r * shape.low_bytes), low, shape.k, shape.low_bits)
    whole &= read_fields(rows, p, np.uint64(offsets[p, 3] + r * shape.code_bytes), code, shape.k, 2)
    if not (whole and padding_is_zero(rows, p, at_high, shape.high_bits)):
        return 6
    # checked before anything uses `place`, whose first k entries are otherwise of an earlier chunk
    if found != np.uint64(shape.k):
        return 2
    join_parts(place, low, shape.k, shape.low_bits)
    if not rises(low, shape.k):
        return 3
    return _judge(table, low, code, shape.k)


@inlined
def _judge(table: Ints, place: Marks, code: Marks, k: int) -> int:
    """0 where table and codes are the one form of what they say, else the number of a fault."""
    count = 0
    while count < ENTRIES and table[count] != 0:
        count += 1
    for entry in range(1, ENTRIES):
        if (entry < count and table[entry] <= table[entry - 1]) or (entry >= count and table[entry] != 0):
            return 31
    used: Any = 0
    for i in range(k):
        used |= 1 << np.int64(code[i])
    # An empty table is a chunk of which nothing is sent: k rising places of which the last is k − 1 are 0 … k − 1.
    if count == 0:
        return 0 if used == 1 and place[k - 1] == np.uint32(k - 1) else 5
    return 0 if used == (1 << count) - 1 else 32


@compiled
def fold_lookup(
    payloads: Any, span: tuple[int, int], shape: Any, step: tuple[int, int], landing: Any,
    theta: Any, out: Any, scratch: Any,
) -> int:  # fmt: skip
    """As `sparse_fold.fold_sparse`, which has the reasons."""
    alpha_256, floor_256 = step
    there, place, low, code, table, value, sums, wide, touched, total, moves = scratch
    for c in range(span[0], span[1]):
        count, weight, spilt = np.uint64(0), 0, False
        members, atom = find_members(c, payloads, there), payloads.atom_C[c]
        for m in range(members):
            fault = read_chunk(payloads, m, there, shape, table, place[0], low[0], code[0])
            if fault:
                return fault
            p = there[0, m]
            own_weight = payloads.weight_PA[p, atom] if len(out) else 0
            if own_weight:
                weight += own_weight
                if weight > MAX_PACKED_WEIGHT:
                    spill(sums, wide[0], wide[1])
                    count, weight, spilt = np.uint64(0), own_weight, True
                for entry in range(ENTRIES):
                    size = clipped(abs(table[entry]), payloads, p, c) * LOW_LEVEL * own_weight
                    total_q = -size if table[entry] < 0 else size
                    # Nothing left of it: its weight does not count in the mean of its places.
                    value[entry] = packed(total_q, own_weight) if size else 0
                for i in range(shape.k):
                    addend, spot = value[np.uint64(code[0, i])], np.uint64(low[0, i])
                    if addend:
                        touched[count] = low[0, i]
                        count += np.uint64(sums[spot] == 0)
                        sums[spot] += addend
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
def decode_lookup(payloads: Any, shape: Any, index: Ints, q: Ints, scratch: Any) -> int:
    """Indices and values (2⁻²⁶) `[C, k]` of one payload, which has all chunks; 0, or the number of a fault."""
    there, place, low, code, table, _, _, _, _, _, _ = scratch
    for c in range(len(index)):
        find_members(c, payloads, there)
        fault = read_chunk(payloads, 0, there, shape, table, place[0], low[0], code[0])
        if fault:
            return fault
        for i in range(shape.k):
            index[c, i] = low[0, i]
            q[c, i] = table[np.uint64(code[0, i])] * LOW_LEVEL
    return 0


@compiled
def measure_lookup(payloads: Any, span: tuple[int, int], shape: Any, scratch: Any, halves: Any, bits: int) -> None:
    """As `measuring.measure_sparse`: halves of `bits` bits. Of an illegal payload any number."""
    there, place, low, code, table, _, _, _, _, _, _ = scratch
    for c in range(span[0], span[1]):
        atom = payloads.atom_C[c]
        for m in range(find_members(c, payloads, there)):
            if read_chunk(payloads, m, there, shape, table, place[0], low[0], code[0]):
                return
            for i in range(shape.k):
                square = table[np.uint64(code[0, i])] ** 2
                halves[there[0, m], atom, 0] += (square >> bits) * LOW_LEVEL * LOW_LEVEL
                halves[there[0, m], atom, 1] += (square & ((1 << bits) - 1)) * LOW_LEVEL * LOW_LEVEL


@compiled
def place_lookup(payloads: Any, c: int, shape: Any, shift: int, own: Any, scratch: Any) -> int:
    """Places and clipped values of chunk `c` of all payloads into `own` (`measuring`); how many, −1 if illegal."""
    there, place, low, code, table, _, _, _, _, _, _ = scratch
    members = find_members(c, payloads, there)
    for m in range(members):
        if read_chunk(payloads, m, there, shape, table, place[0], low[0], code[0]):
            return -1
        for i in range(shape.k):
            units = table[np.uint64(code[0, i])]
            size = (clipped(abs(units), payloads, there[0, m], c) * LOW_LEVEL) >> shift
            own.place_MK[m, i] = low[0, i]
            own.value_MK[m, i] = -size if units < 0 else size
    return members
