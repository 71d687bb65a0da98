"""Triton: a = β·e + (anchor − local) of one chunk, and its exact top-k by magnitude, ties to the lower index.

One program takes one chunk, in registers: 12 bytes are read and 4 written of each value. Counting finds a bar that
at least k and not many more reach: bits of |x| rise with |x|, and values of one scale take three or four counts,
equal ones 31. Those few are written out, and a second kernel ranks them exactly.
"""

import triton.language as tl

from atoll.node.learning.compress.selecting import NOT_FINITE
from atoll.node.learning.kernels.on_gpu import kernel, kernel_for_any

_NOT_FINITE: tl.constexpr = tl.constexpr(NOT_FINITE)
_LARGEST: tl.constexpr = tl.constexpr(0x5F800000)
"""Bits of 2⁶⁴: weights from there on are not sound."""
_MAGNITUDE: tl.constexpr = tl.constexpr(0x7FFFFFFF)
_OCTAVE: tl.constexpr = tl.constexpr(1 << 23)
"""Where the search begins: one octave below the largest."""


@kernel
def magnitudes(values: tl.tensor) -> tl.tensor:
    """Bits of |x| as int32, which rise with |x|."""
    return values.to(tl.int32, bitcast=True) & _MAGNITUDE


@kernel_for_any("first")
def choose(
    anchor: tl.tensor, local: tl.tensor, residual: tl.tensor, out: tl.tensor, held: tl.tensor, place: tl.tensor,
    value: tl.tensor, faults: tl.tensor, beta: tl.tensor, first: tl.tensor,
    k: tl.constexpr, most: tl.constexpr, size: tl.constexpr,
) -> None:  # fmt: skip
    """Chunk `first + program`: a into `out`, and at most `most` values, the k best among them, by rising place.

    They go into row `program` of `place` and `value`, `[chunks, most]`, their number into `held`. `out` may be
    `local` or `residual`. `faults[0]` is set for weights that are not sound, `faults[1]` for an `a` that is not
    finite. A chunk is `size` values.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, size)
    at = (first + row) * size
    theirs = tl.load(local + at + i)
    a = tl.load(residual + at + i) * beta + (tl.load(anchor + at + i) - theirs)
    # 2⁶⁴ bounds the weights only: with them below it e stays finite for more rounds than anybody trains.
    is_sound = tl.max(magnitudes(theirs), 0) < _LARGEST
    top = tl.max(magnitudes(a), 0)
    tl.store(out + at + i, a)
    if is_sound & (top < _NOT_FINITE):
        low, high, found, over = _bars(magnitudes(a), top, k, most, size)
        tl.store(held + row, tl.minimum(found, most))
        _store_candidates(a, i, low, high, most - over, place + row * most, value + row * most)
    else:
        # Every program that stores here stores 1, so no atomic is needed.
        tl.store(faults + tl.where(is_sound, 1, 0), 1)
        tl.store(held + row, 0)


@kernel
def _bars(bits: tl.tensor, top: tl.tensor, k: tl.constexpr, most: tl.constexpr, size: tl.constexpr) -> tl.tensor:
    """`found` ≥ k magnitudes reach `low`, `over` < k reach `high`. More than `most` are found only of one size."""
    # Invariant, as in the CPU's search: at least k reach `low`, fewer than k reach `high`. Steps double from
    # the top, because the k-th largest of 4096 values is usually an octave or two below the largest.
    low, high, step = top * 0, top + 1, top * 0 + _OCTAVE
    found, over = low + size, low
    while (high - low > 1) & (found > most):
        probe = tl.maximum(low + (high - low) // 2, high - step)
        count = tl.sum((bits >= probe).to(tl.int32), 0)
        enough = count >= k
        found, over = tl.where(enough, count, found), tl.where(enough, over, count)
        low, high = tl.where(enough, probe, low), tl.where(enough, high, probe)
        step = tl.where(enough, step, tl.minimum(step, 1 << 29) * 2)
    return low, high, found, over


@kernel
def _store_candidates(
    a: tl.tensor,
    i: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    room: tl.tensor,
    place: tl.tensor,
    value: tl.tensor,
) -> None:
    """Store what reaches `high`, and the first `room` of those that only reach `low`, one behind the other."""
    bits = magnitudes(a)
    above = bits >= high
    between = (bits >= low) & (bits < high)
    # one scan for two counts: both are at most 4096, so 16 bits hold each
    counted = tl.cumsum((above.to(tl.int32) << 16) + between.to(tl.int32), 0)
    ties = counted & 0xFFFF
    # Ties beyond the room have the higher indices, so they would lose the ranking too.
    kept = above | (between & (ties <= room))
    at = (counted >> 16) + tl.minimum(ties, room) - 1
    tl.store(place + at, i, mask=kept)
    tl.store(value + at, a, mask=kept)


@kernel_for_any("chunks")
def keep_best(
    held: tl.tensor, some_place: tl.tensor, some_value: tl.tensor, place: tl.tensor, value: tl.tensor,
    order: tl.tensor, chunks: tl.tensor, k: tl.constexpr, most: tl.constexpr, group: tl.constexpr,
) -> None:  # fmt: skip
    """The k best of row `program` of `choose`: `place` and `value` `[chunks, k]` by rising place.

    `order` `[k, chunks]`: bits of their sizes, rising. A value's rank is the number of those that go before it.
    Where nothing is held, as after a fault, k zeros are.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, most)
    number = tl.load(held + row)
    ranked = tl.maximum(number, k)
    a = tl.load(some_value + row * most + i, mask=i < number, other=0.0)
    at = tl.load(some_place + row * most + i, mask=i < number, other=0)
    mine = magnitudes(a)
    before = tl.zeros((most,), tl.int32)
    start = number * 0
    while start < ranked:
        j = start + tl.arange(0, group)
        other = magnitudes(tl.load(some_value + row * most + j, mask=j < number, other=0.0))
        other = tl.where(j < ranked, other, -1)[:, None]
        bar = mine[None, :] - (j[:, None] < i[None, :]).to(tl.int32)  # equal sizes: the lower index goes before
        before += tl.sum((other > bar).to(tl.int32), 0)
        start += group
    best = (i < ranked) & (before < k)
    to = row * k + tl.cumsum(best.to(tl.int32), 0) - 1
    tl.store(place + to, at, mask=best)
    tl.store(value + to, a, mask=best)
    tl.store(order + (k - 1 - before).to(tl.int64) * chunks + row, mine, mask=best)
