"""Compiled: the sums of one chunk over all members, and the outer step that they make, in exact integers.

A place keeps Σ weight·q and the weight of its senders in one int64: the weight in the low PACKED_BITS bits. With
|q| < 2²⁸ (precisely 12·2²⁴) and all weights together below 2¹⁷ the sum stays below 2⁶² (12·2²⁴·2¹⁷·2¹⁷ < 2⁶²).
A set of more weight is taken in parts: each part's sums are moved to two wide arrays before the next one.

Only places that somebody sent are divided: the quotient of two float64 is off by at most one, and the remainder,
taken in integers, says which way. `atoll.node.learning.outer.mean` is the definition and has the bounds of
all sums.
"""

from typing import Any

import numpy as np

from atoll.node.learning.kernels.compiled import Ints, Ints32, Marks, inlined
from atoll.protocols.run.arena import CHUNK

PACKED_BITS = 17
_WEIGHT_MASK = np.int64((1 << PACKED_BITS) - 1)
CLIP_BITS = 16
"""1 << CLIP_BITS leaves a payload as it is; less clips it."""
HALF = 1 << (CLIP_BITS - 1)
MAX_PACKED_WEIGHT = (1 << PACKED_BITS) - 1
"""Most that the weights of one part may sum to."""


@inlined
def find_members(c: int, payloads: Any, there: Ints) -> int:
    """Numbers of the payloads that have chunk `c`, and its row in each, into `there`; how many there are."""
    found = 0
    for p in range(len(payloads.map_P)):
        row = payloads.rows_UC[payloads.map_P[p], c]
        if row >= 0:
            there[0, found] = p
            there[1, found] = row
            found += 1
    return found


@inlined
def least_weight(payloads: Any, c: int, there: Ints, members: int, floor_256: int) -> int:
    """The least divisor of a chunk: that share of all weight that covers it, rounded up, at least 1."""
    weight, atom = 0, payloads.atom_C[c]
    for i in range(members):
        weight += payloads.weight_PA[there[0, i], atom]
    return max(1, (floor_256 * weight + 255) >> 8)


@inlined
def clipped(unit: int, payloads: Any, p: int, c: int) -> int:
    """A unit of payload `p` in chunk `c` times what is left of it there, to the nearest whole number."""
    # At most the unit itself, so that the bounds above hold whatever a rule decided.
    left: int = payloads.clip_PA[p, payloads.atom_C[c]]
    return (unit * left + HALF) >> CLIP_BITS


@inlined
def add_row(sums: Ints, touched: Marks, count: Any, place: Marks, code: Marks, value: Ints, k: int) -> Any:
    """Add one chunk of one payload, `value` by code packed; the number of places that anybody sent."""
    for i in range(k):
        at = np.uint64(place[i])
        before = sums[at]
        # A place is written always and counted if it is new: a branch here would be guessed wrong half the time.
        # A sum that is 0 is untouched, because the weight in its low bits is at least 1 otherwise.
        touched[count] = place[i]
        count += np.uint64(before == 0)
        sums[at] = before + value[np.uint64(code[i])]
    return count


@inlined
def packed(total: int, weight: int) -> int:
    """One member's addend to a place: weight·q above the low bits, the weight in them."""
    # No carry reaches the total while all weights of a part together fit PACKED_BITS.
    return (total << PACKED_BITS) + weight


@inlined
def spill(sums: Ints, wide_total: Ints, wide_share: Ints) -> None:
    """Move packed sums to the wide arrays."""
    for i in range(CHUNK):
        # An arithmetic shift rounds down, so it gives the total back also where that is negative.
        wide_total[i] += sums[i] >> PACKED_BITS
        wide_share[i] += sums[i] & _WEIGHT_MASK
        sums[i] = 0


@inlined
def drain(sums: Ints, touched: Marks, count: int, total: Ints, share: Ints) -> None:
    """Sums and weights of the touched places into `total` and `share`; the sums are zero again."""
    # Two loops: the first gathers and cannot be vectorised, the second is.
    for t in range(count):
        at = np.uint64(touched[t])
        total[t] = sums[at]
        sums[at] = 0
    for t in range(count):
        share[t] = total[t] & _WEIGHT_MASK
        total[t] >>= PACKED_BITS


@inlined
def drain_wide(wide_total: Ints, wide_share: Ints, touched: Marks, total: Ints, share: Ints) -> int:
    """As `drain`, of the wide arrays; the number of places that anybody sent."""
    count = np.uint64(0)
    for i in range(CHUNK):
        touched[count] = i
        total[count], share[count] = wide_total[i], wide_share[i]
        count += np.uint64(wide_share[i] != 0)
        wide_total[i], wide_share[i] = 0, 0
    return int(count)


@inlined
def divide(total: Ints, share: Ints, count: int, alpha: int, least: int) -> None:
    """Sums become outer steps: −α·mean, halves away from zero, units of 2⁻²⁴."""
    for t in range(count):
        # q counts quarters of a unit and α counts 256ths: together 2¹⁰. Half of the divisor is added to round.
        half = max(share[t], least) << 10
        bottom = half << 1
        top = ((alpha * abs(total[t])) << 1) + half
        # Division of int64 does not vectorise, that of float64 does. Each of its roundings is at most 2⁻⁵³ of the
        # value and the quotient is below 2²⁹, so it is off by at most one, which the exact remainder corrects.
        size = np.int64(np.float64(top) / np.float64(bottom))
        rest = top - size * bottom
        size += np.int64(rest >= bottom) - np.int64(rest < 0)
        total[t] = -size if total[t] > 0 else size


@inlined
def scatter(row: Ints32, touched: Marks, moves: Ints, count: int) -> None:
    """The steps of the touched places into `row`, which is zero elsewhere."""
    for t in range(count):
        row[np.uint64(touched[t])] = np.int32(moves[t])


@inlined
def finish_chunk(
    sums: Ints, wide: Ints, touched: Marks, total: Ints, row: Ints32, sent: tuple[Any, bool], rule: tuple[int, int]
) -> None:
    """The outer steps of a chunk into `row`; the sums are zero again.

    `sent`: places in `touched`, and whether sums were spilt. `rule`: α_256 and the least divisor.
    """
    count, spilt = sent
    found = int(count)
    if spilt:
        # `touched` holds only places of the last part by now, so all places are looked at
        spill(sums, wide[0], wide[1])
        found = drain_wide(wide[0], wide[1], touched, total[0], total[1])
    else:
        drain(sums, touched, found, total[0], total[1])
    divide(total[0], total[1], found, rule[0], rule[1])
    scatter(row, touched, total[0], found)
