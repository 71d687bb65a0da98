"""Compiled: exact top-k of one chunk by magnitude, ties to the lower index; and its values in order.

The chunk is seen as 8 rows of 512. The k-th largest of the 512 columns' maxima is at most the k-th largest
value, so what reaches it is a short list that holds the answer. All comparisons are of the bits of |x| as
integers, which rise with |x|.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from atoll.node.learning.kernels.compiled import inlined
from atoll.protocols.run.arena import CHUNK

Floats = npt.NDArray[np.float32]
Ints32 = npt.NDArray[np.int32]

COLUMNS = 512
ROWS = 8
FAST_K = 128
"""Above it most columns hold a chosen value, and the plain search is the shorter way."""
SPARE = 6
"""Candidates beyond k with which the search for a threshold stops."""
MAX_CANDIDATES = 512
FEW_COLUMNS = 480
SLACK = 32
"""Places behind a chunk for what is written and not counted."""
_MAGNITUDE = np.int32(0x7FFFFFFF)
NOT_FINITE = 0x7F800000
"""Bits of float32 infinity; those of NaN are larger."""


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
def candidates(bits: Ints32, best: Ints32, bar: int, scratch: Any) -> int:
    """Places and magnitudes that reach `bar`, by rising place; their number, or -1 where it is too large.

    Every place is written and only the count depends on the comparison: no branch to guess wrong.
    """
    _, at, key, _, hits, _, _, _ = scratch
    least = np.int32(bar)
    # Only columns whose maximum reaches the bar can hold a candidate: about k of 512.
    columns = np.uint64(0)
    for j in range(COLUMNS):
        hits[columns] = j
        columns += np.uint64(best[j] >= least)
    if columns > FEW_COLUMNS:
        return -1
    found = np.uint64(0)
    for r in range(ROWS):
        row = bits[r * COLUMNS : (r + 1) * COLUMNS]
        first = np.int32(r * COLUMNS)
        for h in range(columns):
            column = np.uint32(hits[h])
            size = row[column] & _MAGNITUDE
            at[found] = first + np.int32(column)
            key[found] = size
            found += np.uint64(size >= least)
    # Every hit column gives eight places at most, so `at` and `key` hold them all before the count is looked at.
    return int(found) if found <= MAX_CANDIDATES else -1


@inlined
def keep_best(found: int, k: int, scratch: Any) -> None:
    """Leave the k best of the candidates in `at` and `key`; `order` becomes their keys, rising."""
    _, at, key, order, _, rank, same, _ = scratch
    # Rank = number of larger keys, counted over whole vectors; −1 pads, because no key is below 0.
    padded = (found + 15) // 16 * 16
    for i in range(found, padded):
        key[i] = -1
    keys = key[:padded]
    for i in range(found):
        bar = keys[i]
        above = np.int32(0)
        for j in range(padded):
            above += np.int32(keys[j] > bar)
        rank[i] = above
        same[i] = 0
    kept = np.uint64(0)
    last = np.int32(k - 1)
    for i in range(found):
        # Equal keys have one rank: `same` counts those that came before, so the lower index goes first.
        step = np.uint32(rank[i])
        place = np.int32(step) + same[step]
        same[step] += np.int32(1)
        size = key[i]
        at[kept] = at[i]
        key[kept] = size
        order[np.uint32(max(last - place, np.int32(-1)) + 1)] = size
        kept += np.uint64(place <= last)


@inlined
def plain_search(bits: Ints32, k: int, top: int, scratch: Any) -> None:
    """The same answer for any k and any values, by counting over the whole chunk."""
    best, at, key, order, _, rank, _, size = scratch
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
    """Arrays that `choose` works in: best, at, key, order (its first place is waste), hits, rank, same, size."""
    return (
        np.empty(COLUMNS, np.int32),
        np.empty(CHUNK + SLACK, np.int32),
        np.empty(CHUNK + SLACK, np.int32),
        np.empty(k + 1, np.int32),
        np.empty(COLUMNS + 1, np.int32),
        np.empty(max(MAX_CANDIDATES, k), np.int32),
        np.empty(MAX_CANDIDATES, np.int32),
        np.empty(CHUNK, np.int32),
    )


@inlined
def choose(bits: Ints32, k: int, guess: int, scratch: Any) -> int:
    """Fill `at`, `key` (by rising place) and `order[1:]` (by rising size) with the k best; the bar for them.

    Returns -1 if the chunk holds NaN or infinity.
    """
    best = scratch[0]
    top = columns_of(bits, best)
    if top >= NOT_FINITE:
        return -1
    bar = guess
    found = -1
    # A bar that k columns' maxima reach is reached by at least k values: nothing that is chosen lies below it.
    if k <= FAST_K:
        bar = threshold(best, k, SPARE, guess, top)
        found = candidates(bits, best, bar, scratch)
    if found >= 0:
        keep_best(found, k, scratch)
    else:
        plain_search(bits, k, top, scratch)
    return bar
