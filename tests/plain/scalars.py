"""The directions and the fold of zeroth-order runs by their definition, in Python's integers and plain numpy."""

import numpy as np
from numpy.typing import NDArray

from atoll.protocols.run.arena import CHUNK

_MASK = (1 << 64) - 1


def word(seed: int, at: int) -> int:
    """Word `at` of SplitMix64 from a seed."""
    mixed = (seed + (at + 1) * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def direction(seed: int, step: int, chunks: int) -> NDArray[np.int64]:
    """z of a step, ±1, `[chunks, 4096]`."""
    bits = [word(seed, at) >> bit & 1 for at in range(chunks * CHUNK // 64) for bit in range(64)]
    signs = 1 - 2 * np.array(bits, np.int64).reshape(chunks, CHUNK)
    walsh = [1 - 2 * ((step & (j % 512)).bit_count() & 1) for j in range(CHUNK)]
    return signs * np.array(walsh, np.int64)


def moved(
    theta: NDArray[np.int64], members: list[tuple[int, int, list[int]]], alpha_256: int, unit: int
) -> NDArray[np.int64]:
    """θ + U of members (weight, seed, scalars): one rounded division of whole numbers, halves away from zero."""
    total = np.zeros(theta.shape, object)
    for weight, seed, scalars in members:
        for step, scalar in enumerate(scalars):
            if scalar:
                total += weight * scalar * direction(seed, step, len(theta)).astype(object)
    top, bottom = alpha_256 * unit * total, sum(weight for weight, _, _ in members) << 14
    size = (2 * abs(top) + bottom) // (2 * bottom)
    return np.array(theta - np.where(top > 0, size, -size), np.int64)
