"""Chooses the training windows of a member: a pure function of (seed, step, slot), disjoint and resumable.

All windows of the text have one shuffled order, keyed by the run's seed. Each step of all members together takes
the next `slots × batch` places of that order, cyclically. So members never read a window twice within one pass,
and while the number of members is constant, all windows are read before any is read again.
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
    """Number of inner steps of all earlier rounds (RunSpec.steps_before)."""
    slot: int
    slots: int
    batch: int


def windows(place: WindowPlace, step: int, num_windows: int) -> NDArray[np.int64]:
    """Indices `[B]`, int64, of the windows of inner step `step` (from 0) of the round."""
    first = ((place.first_step + step) * place.slots + place.slot) * place.batch
    at = (np.arange(place.batch, dtype=np.uint64) + np.uint64(first)) % np.uint64(num_windows)
    return permuted(at, place.seed, num_windows).astype(np.int64)


def permuted(at: NDArray[np.uint64], seed: int, size: int) -> NDArray[np.uint64]:
    """Values at places `at` of a permutation of 0 … size−1, which is not stored.

    A Feistel network permutes the next power of four. Values outside are permuted again until they are inside
    ("cycle walking", Black and Rogaway 2002), fewer than four times on average.
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
    """The finaliser of splitmix64, elementwise; uint64 products wrap by definition."""
    value = (value ^ value >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ value >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return value ^ value >> np.uint64(31)
