"""Expert merging: early in a run each expert moves a little towards similar ones (SPES, arXiv 2602.11543).

In each layer, the similarity of two experts is the cosine of their gate projections. All experts move at once
towards the mean of their `donors` nearest others:  θ_e += α · mean_j(θ_j − θ_e),  α = α₀ · (1 − t/T).

Merging is part of the fold, so every member must compute the same bits. Weights are int32 in units of 2⁻²⁴; dot
products are exact integers (float64 products of halves, which cannot round in any order of summation); cosines are
compared as fractions; ties go to the lower index; the move rounds halves up.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.model_spec import ModelSpec, expert_of
from atoll.protocols.run.run_spec import RunSpec
from atoll.protocols.run.sections.merging import ALPHA_BITS

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_HALF_BITS = 16
_BLOCK = 1 << 16
"""Values in one exact product: each is below 2³², so even 2²⁰ sum to less than 2⁵³. Fewer need less memory."""


def merge_after_round(spec: RunSpec, number: int) -> Callable[[Tensor], None] | None:
    """The merge after round `number`, which changes int32 Θ `[C, 4096]` in place; None if there is none."""
    rule = spec.outer.merge
    if not rule or not rule.alpha(number):
        return None
    return partial(merge, model=spec.model, alpha=rule.alpha(number), donors=rule.donors)


def merge(theta_C4096: Tensor, model: ModelSpec, alpha: int, donors: int) -> None:
    """Merge the experts of an arena int32 `[C, 4096]` in place.

    All experts of a layer have the same layout, so chunks are merged as they are; padding is zero and stays zero.
    """
    rows = {
        place.name: theta_C4096[place.first_chunk : place.first_chunk + place.blocks[0] * place.blocks[1]]
        for place in arena_of(model).placements
        if expert_of(place.name) is not None
    }
    for name, value in merged({name: part.numpy() for name, part in rows.items()}, model, alpha, donors):
        rows[name].copy_(torch.from_numpy(value))


def merged(
    theta: Mapping[str, NDArray[np.int32]], model: ModelSpec, alpha: int, donors: int
) -> Iterator[tuple[str, NDArray[np.int32]]]:
    """Names and merged int32 values of all experts' atoms. Pure.

    `alpha` is 0 … 2²⁴, where 2²⁴ moves all the way to the donors' mean. With fewer than `donors` others, all of
    them are donors. Values that were yielded may be written into `theta`.
    """
    experts = range(model.expert_count)
    for layer in range(model.layers if len(experts) > 1 else 0):
        at = f"model.layers.{layer}.mlp.experts."
        nearest = nearest_of(dots([theta[f"{at}{expert}.gate_proj.weight"] for expert in experts]), donors)
        for projection in PROJECTIONS:
            names = [f"{at}{expert}.{projection}.weight" for expert in experts]
            yield from zip(names, moved([theta[name] for name in names], nearest, alpha), strict=True)


def dots(vectors: Sequence[NDArray[np.int32]]) -> list[list[int]]:
    """Exact dot products `[E][E]` of all pairs of equally shaped int32 arrays of less than 2³⁰ values."""
    flat = [vector.reshape(-1) for vector in vectors]
    total_3EE = np.zeros((3, len(flat), len(flat)), np.int64)
    for start in range(0, len(flat[0]), _BLOCK):
        total_3EE += _block_dots(np.stack([vector[start : start + _BLOCK] for vector in flat]))
    high, mixed, low = total_3EE.tolist()
    return [
        [(h << (2 * _HALF_BITS)) + (m << _HALF_BITS) + n for h, m, n in zip(*rows, strict=True)]
        for rows in zip(high, mixed, low, strict=True)
    ]


def nearest_of(dots_EE: list[list[int]], donors: int) -> list[list[int]]:
    """For each expert, the `donors` others with the highest cosine; ties go to the lower index."""
    found = []
    for base, row in enumerate(dots_EE):
        ranked = sorted((-_likeness(row[e], dots_EE[e][e]), e) for e in range(len(row)) if e != base)
        found.append([e for _, e in ranked[:donors]])
    return found


def moved(atoms: list[NDArray[np.int32]], nearest: list[list[int]], alpha: int) -> list[NDArray[np.int32]]:
    """Each array moved by α / 2²⁴ towards the mean of its donors, computed from the values before the move."""
    found = []
    for base, donors in zip(atoms, nearest, strict=True):
        own = base.astype(np.int64)
        away = sum((atoms[donor].astype(np.int64) for donor in donors), np.zeros_like(own)) - len(donors) * own
        # |away| ≤ donors · 2³² and α ≤ 2²⁴: below 2⁶³ for less than 128 donors.
        whole = len(donors) << ALPHA_BITS
        found.append((own + (away * alpha + whole // 2) // whole).astype(np.int32))
    return found


def _likeness(dot: int, size: int) -> Fraction:
    """sign · dot² / |other|², which orders experts as the cosine with a fixed base does; 0 for a zero expert."""
    return Fraction(dot * abs(dot), size) if size else Fraction(0)


def _block_dots(part_EN: NDArray[np.int32]) -> NDArray[np.int64]:
    """Dot products `[3, E, E]` of at most 2²⁰ values' halves: high with high, the mixed ones, low with low.

    Products of 16-bit halves and all their sums are exact in float64.
    """
    high = (part_EN >> _HALF_BITS).astype(np.float64)
    low = (part_EN & ((1 << _HALF_BITS) - 1)).astype(np.float64)
    cross_EE = high @ low.T
    return np.stack([high @ high.T, cross_EE + cross_EE.T, low @ low.T]).astype(np.int64)
