"""Compiled: the exact top-k of one chunk by magnitude, ties to the lower index, and the best fit of its values.

The chunk is seen as 8 rows of 512. The k-th largest of the 512 columns' maxima is at most the k-th largest value,
so what reaches it is a short list that holds the answer. All comparisons are of the bits of |x| as integers,
which rise with |x|.

The fit is the best scale, shape and split of the chosen values, exactly.
"""

from typing import Any

import numpy as np

from atoll.node.learning.kernels.compiled import Doubles, Floats, Ints32, inlined
from atoll.node.learning.kernels.ranking import MAX_CANDIDATES, candidates, keep_best
from atoll.protocols.run.arena import CHUNK
from atoll.protocols.run.payload import HIGH_LEVELS, LOW_LEVEL, ONE_FP16, SHAPE_SHIFT

COLUMNS = 512
FAST_K = 128
"""Above it most columns hold a chosen value, and the plain search is the shorter way."""
SPARE = 6
"""Candidates beyond k with which the search for a threshold stops."""
SLACK = 32
"""Places behind a chunk for what is written and not counted."""
_MAGNITUDE = np.int32(0x7FFFFFFF)
NOT_FINITE = 0x7F800000
"""Bits of float32 infinity; those of NaN are larger."""
HIGHS = np.array(HIGH_LEVELS, np.int64)
SHAPES = len(HIGH_LEVELS)


@inlined
def count_from(values: Ints32, least: int) -> int:
    """Number of values that are `least` or more."""
    found = np.int32(0)
    bar = np.int32(least)
    for i in range(len(values)):
        found += np.int32(values[i] >= bar)
    return int(found)


@inlined
def threshold(values: Ints32, k: int, spare: int, guess: int, top: int) -> int:
    """A bar that at least k values reach, and at most k + spare unless equal values make it more.

    `guess` is where to look first; `top` is the largest value.
    """
    # Invariant: at least k values reach `low`, fewer than k reach `high`. Steps of a fraction of an octave (the
    # exponent is above bit 23) around the guess come first, then halving ends the search in at most 31 counts.
    low, high = 0, top + 1
    step = 1 << 19
    probe = guess if low < guess < high else (low + high) // 2
    while high - low > 1:
        found = count_from(values, probe)
        if found >= k:
            low = probe
            if found <= k + spare:
                break
            probe = probe + step if step else (low + high) // 2
        else:
            high = probe
            probe = probe - step if step else (low + high) // 2
        step *= 2
        if step > 1 << 23 or probe <= low or probe >= high:
            step = 0
            probe = (low + high) // 2
    return low


@inlined
def columns_of(bits: Ints32, best: Ints32) -> int:
    """Largest magnitude of each column into `best`; the largest of all."""
    # Eight loads at constant distances, written out: the compiler makes vector instructions of them.
    m = _MAGNITUDE
    for j in range(COLUMNS):
        first = max(max(bits[j] & m, bits[j + 512] & m), max(bits[j + 1024] & m, bits[j + 1536] & m))
        last = max(max(bits[j + 2048] & m, bits[j + 2560] & m), max(bits[j + 3072] & m, bits[j + 3584] & m))
        best[j] = max(first, last)
    top = np.int32(0)
    for j in range(COLUMNS):
        top = max(top, best[j])
    return int(top)


@inlined
def plain_search(bits: Ints32, k: int, top: int, scratch: Any) -> None:
    """The same answer for any k and any values, by counting over the whole chunk."""
    best, at, key, order, rank, size = scratch
    for i in range(CHUNK):
        size[i] = bits[i] & _MAGNITUDE
    # With no spare the bar is the k-th largest value: all above it are taken, and the first of those equal to it.
    bar = threshold(size, k, 0, 0, top)
    ties = k - count_from(size, bar + 1)
    kept = 0
    for i in range(len(size)):
        if size[i] > bar or (size[i] == bar and ties > 0):
            ties -= int(size[i] == bar)
            at[kept] = i
            key[kept] = size[i]
            kept += 1
    for i in range(k):
        order[i + 1] = key[i]
    sort_bits(order[1 : k + 1], rank, best)


@inlined
def sort_bits(values: Ints32, spare: Ints32, tally: Ints32) -> None:
    """Sort integers ≥ 0 in place, a byte at a time."""
    # Stable passes from the low byte up; no key is negative, so the top byte needs no case of its own.
    for shift in range(0, 32, 8):
        tally[:] = 0
        for i in range(len(values)):
            tally[np.uint32(values[i] >> shift) & np.uint32(255)] += 1
        start = np.int32(0)
        for b in range(256):
            start, tally[b] = start + tally[b], start
        for i in range(len(values)):
            byte = np.uint32(values[i] >> shift) & np.uint32(255)
            spare[tally[byte]] = values[i]
            tally[byte] += 1
        for i in range(len(values)):
            values[i] = spare[i]


def selection_scratch(k: int) -> tuple[Ints32, ...]:
    """Arrays that `choose` works in: best, at, key, order (its first place is waste), rank, size."""
    return (
        np.empty(COLUMNS, np.int32),
        np.empty(CHUNK + SLACK, np.int32),
        np.empty(CHUNK + SLACK, np.int32),
        np.empty(k + 1, np.int32),
        np.empty(max(MAX_CANDIDATES, k), np.int32),
        np.empty(CHUNK, np.int32),
    )


@inlined
def choose(bits: Ints32, k: int, guess: int, scratch: Any) -> int:
    """Fill `at`, `key` (by rising place) and `order[1:]` (by rising size) with the k best; the bar for them.

    Returns -1 if the chunk holds NaN or infinity.
    """
    best, at, key, order, rank, _ = scratch
    top = columns_of(bits, best)
    if top >= NOT_FINITE:
        return -1
    bar = guess
    found = -1
    # A bar that k columns' maxima reach is reached by at least k values: nothing that is chosen lies below it.
    if k <= FAST_K:
        bar = threshold(best, k, SPARE, guess, top)
        found = candidates(bits, bar, at, key)
    if found >= 0:
        keep_best(found, k, at, key, order, rank)
    else:
        plain_search(bits, k, top, scratch)
    return bar


def norms_of(k: int) -> Doubles:
    """`[shapes, k]`: Σ level² by shape and number of small values less one."""
    few = np.arange(1, k + 1, dtype=np.float64)
    return np.stack([LOW_LEVEL**2 * few + float(high) ** 2 * (k - few) for high in HIGH_LEVELS])


@inlined
def best_fit(small: Doubles, norms: Doubles, gain: Doubles) -> tuple[int, int, float]:
    """Shape, index of the largest small value, and scale of least error; `small` are cumulative sums of sizes.

    Gains are compared as integers, which is the same for values that are not negative, and vectorises.
    """
    k = len(small)
    total = small[k - 1]
    # Least squares: the error is Σv² − (Σlv)²/Σl², so the largest (Σlv)²/Σl² wins. Ties go to the lower shape and
    # then to the fewer small values, as in the plain version: both are part of the payload's bytes.
    most, shape = np.int64(-1), 0
    for s in range(SHAPES):
        row, norm, high = gain[s], norms[s], np.float64(HIGHS[s])
        for i in range(k):
            dot = LOW_LEVEL * small[i] + high * (total - small[i])
            row[i] = dot * dot / norm[i]
        largest = np.int64(-1)
        bits = row.view(np.int64)
        for i in range(k):
            largest = max(largest, bits[i])
        if largest > most:
            most, shape = largest, s
    split = 0
    bits = gain[shape].view(np.int64)
    while bits[split] != most:
        split += 1
    dot = LOW_LEVEL * small[split] + np.float64(HIGHS[shape]) * (total - small[split])
    return shape, split, 4.0 * dot / norms[shape, split]


@inlined
def half_bits(scale: float, single: Floats) -> int:
    """Bits of the fp16 nearest to a scale ≥ 0, halves to even, through float32 as torch does; at most 1.0."""
    if scale >= 1.0:
        return ONE_FP16
    single[0] = np.float32(scale)
    bits = int(single.view(np.uint32)[0])
    exponent = (bits >> 23) - 127
    # below half of the smallest subnormal, 2⁻²⁴
    if exponent < -25:
        return 0
    mantissa = (bits & 0x7FFFFF) | 0x800000
    # an fp16 keeps 11 bits of 24, and one less for each step below its smallest normal exponent, −14
    drop = 13 if exponent >= -14 else -1 - exponent
    kept = mantissa >> drop
    rest = mantissa & ((1 << drop) - 1)
    middle = 1 << (drop - 1)
    if rest > middle or (rest == middle and kept & 1):
        kept += 1
    # A carry out of the mantissa lands in the exponent, which is the next larger number: no case of its own.
    return kept + ((exponent + 14) << 10) if exponent >= -14 else kept


@inlined
def units_of(half: Any) -> Any:
    """An fp16 scale ≥ 0 in units of 2⁻²⁴, exactly: a whole number of at most 2²⁴ for scales up to 1."""
    exponent = half >> 10
    fraction = half & 0x3FF
    return (fraction + 1024) << (exponent - 1) if exponent else fraction


@inlined
def word_of(half: int, shape: int, any_large: bool) -> int:
    """The 16-bit word of a chunk: fp16 scale and shape, which is 0 where no value is large."""
    return half | (shape << SHAPE_SHIFT) if any_large else half
