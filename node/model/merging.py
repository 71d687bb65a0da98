"""Expert merging: early in a run each expert moves a little towards those most like it (SPES, arXiv 2602.11543).

Per layer, likeness of two experts is the cosine of their gate projections. Each expert moves towards the mean of
its `donors` nearest others, all at once:  θ_e += α · mean_j(θ_j − θ_e),  α = α₀ · (1 − t/T).

It is part of the fold, so every member must find the same bits: weights are int32 in units of 2⁻²⁴, dot products
are exact integers (float64 products of halves that cannot round, whatever the order of summation), cosines are
compared as fractions, ties go to the lower index, and the move rounds halves up.
"""

from collections.abc import Mapping
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from atoll.protocols.model import ModelSpec

DONORS = 4
ALPHA_UNIT = 1 << 24
"""Steps in α = 1."""
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_HALF_BITS = 16
_BLOCK = 1 << 20
"""Values of one exact product: each is below 2³², and 2²⁰ of them below 2⁵³."""


def alpha_at(alpha_0: int, step: int, last: int) -> int:
    """α in units of 2⁻²⁴: falls from `alpha_0` to 0 at `last`."""
    return alpha_0 * max(0, last - step) // last


def merged(
    theta: Mapping[str, NDArray[np.int32]], model: ModelSpec, alpha: int, donors: int = DONORS
) -> dict[str, NDArray[np.int32]]:
    """The moved atoms of all experts, int32, by name; `theta` is not touched. Empty where nothing moves.

    alpha: 0 … 2²⁴ (all the way to the donors' mean). Fewer than `donors` others: all of them. Pure.
    """
    if model.experts is None or model.experts.count < 2 or not alpha:
        return {}
    found: dict[str, NDArray[np.int32]] = {}
    for layer in range(model.layers):
        at = f"model.layers.{layer}.mlp.experts."
        gates = [theta[f"{at}{expert}.gate_proj.weight"] for expert in range(model.experts.count)]
        nearest = nearest_of(dots(gates), donors)
        for projection in PROJECTIONS:
            names = [f"{at}{expert}.{projection}.weight" for expert in range(model.experts.count)]
            moves = moved([theta[name] for name in names], nearest, alpha)
            found.update(zip(names, moves, strict=True))
    return found


def dots(vectors: list[NDArray[np.int32]]) -> list[list[int]]:
    """Exact dot products of all pairs of equally shaped int32 arrays."""
    flat_EN = np.stack([vector.reshape(-1) for vector in vectors])
    total = [[0] * len(vectors) for _ in vectors]
    for start in range(0, flat_EN.shape[1], _BLOCK):
        part_EE = _block_dots(flat_EN[:, start : start + _BLOCK])
        total = [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(total, part_EE, strict=True)]
    return total


def nearest_of(dots_EE: list[list[int]], donors: int) -> list[list[int]]:
    """For each expert, the `donors` others of the highest cosine, ties by index."""
    return [
        sorted((e for e in range(len(row)) if e != base), key=lambda e: (-_likeness(row[e], dots_EE[e][e]), e))[
            :donors
        ]
        for base, row in enumerate(dots_EE)
    ]


def moved(atoms: list[NDArray[np.int32]], nearest: list[list[int]], alpha: int) -> list[NDArray[np.int32]]:
    """Each array moved by α towards the mean of its donors; all from the values before the move."""
    found = []
    for base, donors in zip(atoms, nearest, strict=True):
        own = base.astype(np.int64)
        away = sum((atoms[donor].astype(np.int64) for donor in donors), np.zeros_like(own)) - len(donors) * own
        # |away| ≤ donors · 2³² and α ≤ 2²⁴: below 2⁶³ for less than 128 donors.
        whole = len(donors) * ALPHA_UNIT
        found.append((own + (away * alpha + whole // 2) // whole).astype(np.int32))
    return found


def _likeness(dot: int, size: int) -> Fraction:
    """Orders like the cosine with one fixed base: sign · dot² / |other|²; 0 for an expert that is all zero."""
    return Fraction(dot * abs(dot), size) if size else Fraction(0)


def _block_dots(part_EN: NDArray[np.int32]) -> list[list[int]]:
    """Of at most 2²⁰ values. Products of 16-bit halves and all their sums are exact in float64."""
    high = (part_EN >> _HALF_BITS).astype(np.float64)
    low = (part_EN & ((1 << _HALF_BITS) - 1)).astype(np.float64)
    highs, lows, mixed = high @ high.T, low @ low.T, high @ low.T
    mixed = mixed + mixed.T
    return [
        [
            (int(highs[i, j]) << (2 * _HALF_BITS)) + (int(mixed[i, j]) << _HALF_BITS) + int(lows[i, j])
            for j in range(len(part_EN))
        ]
        for i in range(len(part_EN))
    ]
