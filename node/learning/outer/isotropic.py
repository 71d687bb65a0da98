"""IsoLoCo's mean: of each matrix all singular values become their mean, and the singular vectors stay.

    Δ = USVᵀ        Δ ← σ̄·UVᵀ        σ̄ = Σ σ / min(M, N)

Source: Horoi et al., arXiv 2607.03011, and its code (`orthogonalize_object` gradient): the mean of the members'
updates is made isotropic, then the outer step follows. Published: α = 1.8, β = 0.8 with Nesterov's momentum, and
α = 2.1 without one. Vectors keep their mean. The result is no longer than Δ: √min(M, N)·σ̄ ≤ ‖Δ‖, by Cauchy and
Schwarz.

Every node must get the same bits, so UVᵀ is not from a library's SVD. It comes from steps of Newton and Schulz on
whole numbers, held in float64: five with the coefficients of Polar Express, then cubic ones, which end at 1. A sum
of products is exact in any order while it is below 2⁵³, so any BLAS gives these bits:

    values are units of 2⁻²²    singular values ≤ 1.25, so no part of a sum of X·Xᵀ is above 1.6·2⁴⁴
    |B| ≤ 7·1.6 + 3·2.5 < 19    no part of a sum of B·X is above 19·1.25·2⁴⁴ < 2⁴⁹

σ̄ follows from the trace of Δᵀ·UVᵀ, in whole numbers. A direction weaker than about a 1000th of ‖Δ‖ does not come
up to 1 in these steps, and has less than its share.
"""

from math import isqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.node.learning.kernels.compiled import Ints
from atoll.node.learning.kernels.polar_express import COEFFICIENTS
from atoll.protocols.errors import MODEL_LOST, Divergence
from atoll.protocols.ledger.coverage import Cover
from atoll.protocols.run.arena import SIDE, Arena, Placement

Floats = NDArray[np.float64]
"""Whole numbers of less than 2⁵³, which float64 holds exactly."""
_BITS = 22
"""A value of X is in units of 2⁻²²."""
_DELTA_BITS = 20
"""Most bits of a value of Δ that the direction is found from."""
_COEFFICIENT_BITS = 12
_MEAN_BITS = 38
"""Bits of σ̄: with those of a direction, which is below 1.25, they fit into an int64."""
_CUBIC = (1.5, -0.5, 0.0)
"""X ← 1.5·X − 0.5·XXᵀX: singular values near 1 come to 1, each time by twice as many digits."""
STEPS = (*COEFFICIENTS, _CUBIC, _CUBIC, _CUBIC)
_INT32 = 1 << 31


def isotropic(moved_N4096: Tensor, theta_N4096: Tensor, arena: Arena, cover: Cover) -> None:
    """Make U = moved − θ isotropic in each matrix that lies in the cover whole; `moved` is changed in place.

    Both are int32 in units of 2⁻²⁴, rows of the cover. Raises Divergence where a weight leaves int32.
    """
    for place in arena.placements:
        first = _row_of(place, cover) if len(place.shape) == 2 else None
        if first is None:
            continue
        down, across = place.blocks
        rows = slice(first, first + down * across)
        theta_MN = _matrix(theta_N4096[rows], place)
        step_MN = flattened(_matrix(moved_N4096[rows], place) - theta_MN)
        moved_MN = theta_MN + step_MN
        if int(np.abs(moved_MN).max()) >= _INT32:
            raise Divergence("a weight left its range of -128 … 128", hint=MODEL_LOST)
        whole = _untiled(moved_N4096[rows], place)
        whole[: place.shape[0], : place.shape[1]] = moved_MN
        tiles = whole.reshape(down, SIDE, across, SIDE).swapaxes(1, 2).reshape(down * across, -1)
        moved_N4096[rows] = torch.from_numpy(tiles.astype(np.int32))


def flattened(delta_MN: Ints) -> Ints:
    """σ̄·UVᵀ of an int64 matrix with values below 2²⁹, rounded to the nearest; zeros stay zeros."""
    is_tall = delta_MN.shape[0] > delta_MN.shape[1]
    delta_MN = delta_MN.T if is_tall else delta_MN
    most = int(np.abs(delta_MN).max())
    if not most:
        return np.zeros_like(delta_MN.T if is_tall else delta_MN)
    # Values of a small Δ are made larger too: directions need the digits.
    shift = most.bit_length() - _DELTA_BITS
    size_MN = np.abs(delta_MN)
    size_MN = size_MN >> shift if shift > 0 else size_MN << -shift
    norm = isqrt(_total(size_MN * size_MN)) + 1
    # On magnitudes, so that −Δ gives the mirror image.
    start_MN = (size_MN << _BITS) // norm * np.sign(delta_MN)
    direction_MN = polar(start_MN.astype(np.float64)).astype(np.int64)
    trace = _total(size_MN * np.sign(delta_MN) * direction_MN)
    # σ̄ in units of Δ has as many bits behind the point as fit into an int64 beside a direction.
    top, below = trace << max(0, shift), len(delta_MN) << _BITS + max(0, -shift)
    extra = _MEAN_BITS - (top // below).bit_length()
    if extra < 0:
        raise Divergence("the singular values of a round's mean left their range", hint=MODEL_LOST)
    mean = (top << extra) // below
    out_MN: Ints = (np.abs(direction_MN) * mean + (1 << _BITS + extra - 1)) >> _BITS + extra
    out_MN *= np.sign(direction_MN)
    return out_MN.T if is_tall else out_MN


def polar(x_MN: Floats) -> Floats:
    """About UVᵀ of X = USVᵀ with M ≤ N and ‖X‖ ≤ 1, all in units of 2⁻²²; equal bits on every machine."""
    for a, b, c in STEPS:
        gram_MM = _product(x_MN, x_MN.T)
        poly_MM = _scaled(b, gram_MM) + _scaled(c, _product(gram_MM, gram_MM))
        x_MN = _scaled(a, x_MN) + _product(poly_MM, x_MN)
    return x_MN


def _product(left: Floats, right: Floats) -> Floats:
    """left · right in units of 2⁻²²: sums are exact, and each is rounded once."""
    found: Floats = np.rint((left @ right) * 2.0**-_BITS)
    return found


def _scaled(factor: float, values: Floats) -> Floats:
    """factor · values, of the factor's 4096ths: a float product of any factor would be rounded twice."""
    found: Floats = np.rint(values * round(factor * 2**_COEFFICIENT_BITS) * 2.0**-_COEFFICIENT_BITS)
    return found


def _total(values_MN: Ints) -> int:
    """Sum of values below 2⁴³: those of a row fit an int64, those of all rows may not."""
    return sum(values_MN.sum(axis=1).tolist())


def _row_of(place: Placement, cover: Cover) -> int | None:
    """First row of a matrix among those of the cover; None unless all its chunks are in one span of it."""
    stop, before = place.first_chunk + place.blocks[0] * place.blocks[1], 0
    for span in cover:
        if span.start <= place.first_chunk and stop <= span.stop:
            return before + place.first_chunk - span.start
        before += span.chunks
    return None


def _matrix(rows_C4096: Tensor, place: Placement) -> Ints:
    """The values of a matrix, int64 `[M, N]`, from its blocks."""
    return _untiled(rows_C4096, place)[: place.shape[0], : place.shape[1]]


def _untiled(rows_C4096: Tensor, place: Placement) -> Ints:
    """As `_matrix`, with the padding."""
    down, across = place.blocks
    tiles = rows_C4096.numpy().astype(np.int64).reshape(down, across, SIDE, SIDE).swapaxes(1, 2)
    return tiles.reshape(down * SIDE, across * SIDE)
