"""Which training windows a member reads: a pure function of (seed, step, slot), disjoint and resumable.

All windows of the text stand in one shuffled order, keyed by the run's seed. Step s of all
members together takes the next `slots × batch` places of that order, round and round. So within any stretch
no longer than the text, hence within a round, no window is read twice by anybody, and while the number of
members stays the same none is read again before all have been read.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from atoll.protocols.ids import digest

_ROUNDS = 6


class WindowPlace(msgspec.Struct, frozen=True):
    """A member's place in a round."""

    seed: int
    first_step: int
    """Inner steps of all rounds before this one (RunSpec.steps_before)."""
    slot: int
    slots: int
    batch: int


def windows(place: WindowPlace, step: int, num_windows: int) -> NDArray[np.int64]:
    """Indices `[batch]` of the windows of inner step `step` (from 0) of the round."""
    first = ((place.first_step + step) * place.slots + place.slot) * place.batch
    at = (np.arange(place.batch, dtype=np.uint64) + np.uint64(first)) % np.uint64(num_windows)
    return shuffled(at, place.seed, num_windows).astype(np.int64)


def shuffled(at: NDArray[np.uint64], seed: int, size: int) -> NDArray[np.uint64]:
    """Values at places `at` of a permutation of 0 … size−1, without storing it.

    A Feistel network permutes the next power of four; whatever falls outside is permuted again until it
    falls inside ("cycle walking", Black and Rogaway 2002), fewer than four times on average.
    """
    half = max(1, -(-(size - 1).bit_length() // 2))
    keys = np.frombuffer(digest(b"atoll windows/1", seed.to_bytes(8, "little")) * 2, "<u8")[:_ROUNDS]
    out = _feistel(at, half, keys)
    outside = out >= np.uint64(size)
    while outside.any():
        out[outside] = _feistel(out[outside], half, keys)
        outside = out >= np.uint64(size)
    return out


def _feistel(value: NDArray[np.uint64], half: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = value >> bits, value & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return left << bits | right


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser; uint64 products wrap by definition."""
    value = (value ^ value >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ value >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return value ^ value >> np.uint64(31)
