"""The Flag Aggregator: the subspace that most contributions lie in, found from their inner products.

    repeat:  Y = the m principal directions of the unit vectors ĝ_i, each times w_i
             v_i = |Yᵀĝ_i|², the part of ĝ_i that Y explains;  w_i = (1 − v_i)^(−1/4)
    update = mean of Y Yᵀ ĝ_i

with m = ⌈(n + 1) / 2⌉: a maximum-likelihood estimate of the subspace (Almasi et al., arXiv 2302.05865). Its
basis lies in the span of the ĝ_i, so Y is never formed. The eigenvectors U of w_i K_ij w_j, K the cosines, say
all of it: v_i = Σ λ_k U_ik² / w_i², and the update is Σ c_i ĝ_i with c = w · U Uᵀ (1/w).

Two things differ from the paper. A share below 0 is 0: a fold has no negative weights. And the update is not
made a unit vector: lengths are the clipped ones, as with all rules here.

Every node must find the same bits: all is sums, products, quotients and roots of float64, element by element and
in one order. LAPACK and BLAS choose their order by the machine.
"""

from functools import reduce

import numpy as np
import numpy.typing as npt

from atoll.node.learning.kernels.compiled import Ints

Floats = npt.NDArray[np.float64]
STEPS = 2
"""The principal directions, then weights once: with more steps honest members lose their share if they are few."""
SWEEPS = 12
"""Most sweeps of the Jacobi method, each through all pairs; it converges quadratically."""
_SMALL = 1e-13
"""Elements off the diagonal that are 0, next to eigenvalues of which the largest is at least 1."""
_EPSILON = 1e-7
"""The paper's: no weight is above 57, even of what Y explains wholly."""
_ONE = 1 << 15


def flag_shares(cosine_NN: Ints, one: int) -> Ints:
    """Shares int64 `[n]` that sum to about 2¹⁵, of cosines `[n, n]` in units of 1 / `one`."""
    count = len(cosine_NN)
    cosine = cosine_NN / float(one)
    weight_N = np.ones(count)
    for step in range(STEPS):
        value_N, vector_NN = eigen(weight_N[:, None] * cosine * weight_N)
        best_M = np.argsort(-value_N, kind="stable")[: (count + 2) // 2]
        value_M, vector_NM = np.maximum(value_N[best_M], 0.0), vector_NN[:, best_M]
        if step < STEPS - 1:
            explained_N = _sum((vector_NM * vector_NM * value_M).T) / (weight_N * weight_N)
            weight_N = 1.0 / np.sqrt(np.sqrt(np.abs(1.0 - explained_N) + _EPSILON))
    toward_M = _sum(vector_NM / weight_N[:, None])
    share_N = np.maximum(weight_N * _sum((vector_NM * toward_M).T), 0.0)
    total = float(_sum(share_N[:, None])[0])
    found: Ints = np.floor(share_N / max(total, _EPSILON) * _ONE).astype(np.int64)
    return found


def eigen(matrix_NN: Floats) -> tuple[Floats, Floats]:
    """Eigenvalues `[n]` of a symmetric matrix, and their vectors `[n, n]` in columns: Jacobi's method.

    Pairs of rows that have none in common turn at once, in the order of a round robin (Brent and Luk, 1985).
    """
    count = len(matrix_NN)
    left_NN, vector_NN = matrix_NN.copy(), np.eye(count)
    off_NN = ~np.eye(count, dtype=bool)
    # An odd number gets a bye: the last place stands for nobody.
    places = np.arange(count + count % 2)
    for _ in range(SWEEPS):
        if count < 2 or float(np.abs(left_NN[off_NN]).max()) <= _SMALL:
            break
        for _ in range(len(places) - 1):
            half = len(places) // 2
            p, q = places[:half], places[half:][::-1]
            here = (p < count) & (q < count)
            _turn(left_NN, vector_NN, np.minimum(p, q)[here], np.maximum(p, q)[here])
            places = np.concatenate([places[:1], places[-1:], places[1:-1]])
    return left_NN.diagonal().copy(), vector_NN


def _turn(left_NN: Floats, vector_NN: Floats, p: Ints, q: Ints) -> None:
    """Make the elements (p, q) 0, for all pairs at once."""
    off, apart = left_NN[p, q], left_NN[q, q] - left_NN[p, p]
    # t solves t² + 2 t apart / (2 off) − 1 = 0, the smaller root: the turn is 45° at most.
    both = np.abs(apart) + np.sqrt(apart * apart + 4.0 * off * off)
    tangent = np.where(off == 0.0, 0.0, 2.0 * off / np.where(both == 0.0, 1.0, both))
    tangent = np.where(apart < 0.0, -tangent, tangent)
    cosine = 1.0 / np.sqrt(1.0 + tangent * tangent)
    sine = tangent * cosine
    for one in (left_NN, left_NN.T, vector_NN):
        one_p, one_q = one[:, p], one[:, q]
        one[:, p], one[:, q] = cosine * one_p - sine * one_q, sine * one_p + cosine * one_q


def _sum(row_NM: Floats) -> Floats:
    """The sum of all rows, the first to the last: numpy's own order depends on strides."""
    return reduce(np.add, row_NM)
