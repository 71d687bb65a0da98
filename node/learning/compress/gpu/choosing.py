"""Triton: a = β·e + (anchor − local) of one chunk, and the few values among which its k best are.

A chunk is seen as 4 rows of 1024. A bar that k columns' maxima reach is reached by at least k values, so the
search for it counts one number for each column. The columns that reach it are written down and read again, and
what of them reaches the bar is written down. Nothing of a chunk stays in registers meanwhile: so many programs
share a multiprocessor, and take turns to wait. Bits of |x| rise with |x|.

Where equal values make the list too long, the whole chunk is counted: a second kernel does that for the few.
"""

import triton.language as tl

from atoll.node.learning.compress.selecting import NOT_FINITE
from atoll.node.learning.kernels.on_gpu import kernel

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


@kernel
def add_up(
    anchor: tl.tensor, local: tl.tensor, residual: tl.tensor, out: tl.tensor, faults: tl.tensor, beta: tl.tensor,
    rows: tl.constexpr, columns: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """a into `out`; the largest magnitude of each column, and the largest of all: -1 where a fault was found.

    `out` may be `local` or `residual`. `faults[0]` is set for weights that are not sound, `faults[1]` for an `a`
    that is not finite.
    """
    i = tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :]
    # Everything is read once: the cache is kept for `out`, of which a few values are read and changed again.
    theirs = tl.load(local + i, eviction_policy="evict_first")
    a = tl.load(residual + i, eviction_policy="evict_first") * beta
    a += tl.load(anchor + i, eviction_policy="evict_first") - theirs
    # 2⁶⁴ bounds the weights only: with them below it e stays finite for more rounds than anybody trains.
    unsound = tl.max((magnitudes(theirs) >= _LARGEST).to(tl.int32), 0)
    best = tl.max(magnitudes(a), 0)
    tl.store(out + i, a)
    top = tl.max(tl.where(unsound == 1, _MAGNITUDE, best), 0)
    if top >= _NOT_FINITE:
        # Every program that stores here stores 1, so no atomic is needed.
        tl.store(faults + tl.where(tl.max(unsound, 0) == 1, 0, 1), 1)
        top = top * 0 - 1
    return best, top


@kernel
def bar_of(best: tl.tensor, top: tl.tensor, k: tl.constexpr, enough: tl.constexpr) -> tl.tensor:
    """A bar that at least k of these reach, and at most `enough` unless of one size; and how many reach it."""
    # Invariant, as in the CPU's search: at least k reach `low`, fewer than k reach `high`. Steps double from
    # the top, because the k-th largest of 4096 values is usually an octave or two below the largest.
    low, high, step = top * 0, top + 1, top * 0 + _OCTAVE
    found = low + enough + 1
    while (high - low > 1) & (found > enough):
        probe = tl.maximum(low + (high - low) // 2, high - step)
        count = tl.sum((best >= probe).to(tl.int32), 0)
        reached = count >= k
        found = tl.where(reached, count, found)
        low, high = tl.where(reached, probe, low), tl.where(reached, high, probe)
        step = tl.where(reached, step, tl.minimum(step, 1 << 29) * 2)
    return low


@kernel
def few_of(
    out: tl.tensor, best: tl.tensor, low: tl.tensor, column: tl.tensor, place: tl.tensor, value: tl.tensor,
    most: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """What reaches `low` into `place` and `value` `[most]`, by rising place; how many. More than `most`: too many.

    `column`: `[most]` to work in.
    """
    hit = (best >= low).to(tl.int32)
    number = tl.cumsum(hit, 0)
    tl.store(column + number - 1, tl.arange(0, columns), mask=(hit == 1) & (number <= most))
    hits, found = tl.sum(hit, 0), low * 0 + most + 1
    if hits <= most:
        tl.debug_barrier()
        t = tl.arange(0, rows * most)
        here = t % most < hits
        at = t // most * columns + tl.load(column + t % most, mask=here, other=0, cache_modifier=".cg")
        a = tl.load(out + at, mask=here, other=0.0, cache_modifier=".cg")
        kept = here & (magnitudes(a) >= low)
        to = tl.cumsum(kept.to(tl.int32), 0) - 1
        found = tl.sum(kept.to(tl.int32), 0)
        kept = kept & (to < most)
        tl.store(place + to, at, mask=kept)
        tl.store(value + to, a, mask=kept)
    return found


@kernel
def bars(bits: tl.tensor, top: tl.tensor, k: tl.constexpr, most: tl.constexpr, size: tl.constexpr) -> tl.tensor:
    """`found` ≥ k magnitudes reach `low`, `over` < k reach `high`. More than `most` are found only of one size."""
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
def store_candidates(
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
