"""EDiT's penalty on pseudo-gradients, in each atom of a round: `outer.aggregate` edit.

    G_i = ‖Δ_i‖      those with G_i > median + 3 · max(1.4826 · MAD, median / 8) count nothing
    w_i ∝ tokens_i · e^(−G_i)          Δ = Σ w_i Δ_i          Δ ← Δ · min(1, φ / ‖Δ‖)

Source: Cheng et al., EDiT and A-EDiT, arXiv 2412.07210; published: φ = 10, temperature 1. The outer step
of Δ is `outer.rule`; theirs is `nesterov`.

What differs. The paper finds anomalies by a moving mean and variance of each worker's own norms, and judges nobody
in its first 120 rounds. Such a history belongs to an identity, which costs nothing here, so this looks across the
members of the round (MAD: median absolute deviation, 1.4826 of which are a standard deviation). As there, a short
one is never an anomaly. The paper has equal batches, so tokens are ours. Who sent nothing in an atom has no vote
there: its weight e⁰ would be the largest.

Weights are whole numbers of which the largest is 255. All is exact integers: the exponential, too.
"""

from collections.abc import Sequence
from math import isqrt

import numpy as np
import numpy.typing as npt
from torch import Tensor

from atoll.node.learning.kernels.compiled import Ints, Ints32, compiled, each_range
from atoll.protocols.ledger.records import MAX_WEIGHT
from atoll.protocols.run.arena import CHUNK
from atoll.protocols.run.payload import VALUE_BITS

Bools = npt.NDArray[np.bool_]
_EXP_BITS = 31
_ROOTS = 12
_FAR = 16
"""e⁻¹⁶ of the largest weight is less than half of one."""
_LEFT_BITS = 16
_HALF_BITS = 24
_HALF_MASK = (1 << _HALF_BITS) - 1


def edit_weights(weight_P: Sequence[int], norm2_P: Sequence[int]) -> list[int]:
    """Weights in an atom, 0 … 255, of claimed weights and of squared norms in units of 2⁻⁵²."""
    norm_P = np.array([isqrt(norm2) for norm2 in norm2_P], np.int64)
    counts_P = (norm_P > 0) & ~anomalies(norm_P)
    if not counts_P.any():
        return [0] * len(norm_P)
    # From the shortest on: only ratios matter, and its exponential is 1.
    share_P = exponential(norm_P - int(norm_P[counts_P].min())) * np.array(weight_P, np.int64) * counts_P
    most = int(share_P.max())
    found: list[int] = ((2 * MAX_WEIGHT * share_P + most) // (2 * most)).tolist()
    return found


def anomalies(norm_P: Ints) -> Bools:
    """Whether each is far above the median of those that are not 0; bool `[P]`."""
    sent = np.sort(norm_P[norm_P > 0])
    if not len(sent):
        return np.zeros(len(norm_P), bool)
    # The upper one of two: of two members none is an anomaly, whichever is longer.
    median = int(sent[len(sent) // 2])
    spread = int(np.sort(np.abs(sent - median))[len(sent) // 2])
    # An eighth: among members that agree, or three by chance, the deviation alone would call honest ones far.
    far_P: Bools = 1024 * (norm_P - median) > 3 * max(1518 * spread, 128 * median)
    return far_P


def exponential(excess_P: Ints) -> Ints:
    """About 2³¹ · e^(−x) of x ≥ 0 in units of 2⁻²⁶, int64 `[P]`; 10⁻⁴ of itself off where x is below 8."""
    below_P = np.clip(excess_P, 0, _FAR << VALUE_BITS) >> (VALUE_BITS + _ROOTS - _EXP_BITS)
    # The 4096th root by its series, then twelve squares; each is below 2⁶².
    found: Ints = (1 << _EXP_BITS) - below_P + (below_P * below_P >> (_EXP_BITS + 1))
    for _ in range(_ROOTS):
        found = found * found >> _EXP_BITS
    return found


def shorten_step(moved_N4096: Tensor, theta_N4096: Tensor, atom_C: Ints32, limit: int, threads: int = 1) -> None:
    """Make U = moved − θ no longer than `limit` (units of 2⁻²⁴) in each atom; `moved` is changed in place."""
    # A copy: the atoms of a run are read-only, which is another type to the compiler.
    moved, theta, atom_C = moved_N4096.numpy(), theta_N4096.contiguous().numpy(), atom_C.copy()
    shape = int(atom_C.max(initial=0)) + 1, 2

    def measure(start: int, stop: int) -> Ints:
        halves = np.zeros(shape, np.int64)
        measure_step(moved, theta, (start, stop), atom_C, halves)
        return halves

    halves_A2 = sum(each_range(len(moved), threads, measure), np.zeros(shape, np.int64))
    norm2_A = [(high << _HALF_BITS) + low for high, low in halves_A2.tolist()]
    whole, limit2 = 1 << _LEFT_BITS, limit * limit
    left = [whole if norm2 <= limit2 else isqrt((limit2 << 2 * _LEFT_BITS) // norm2) for norm2 in norm2_A]
    # Hardly a round is too long: then the step keeps its bits, and nothing is written.
    if min(left) < whole:
        left_A = np.array(left, np.int64)
        each_range(len(moved), threads, lambda start, stop: shorten(moved, theta, (start, stop), atom_C, left_A))


@compiled
def measure_step(moved: Ints32, theta: Ints32, span: tuple[int, int], atom_C: Ints32, halves: Ints) -> None:
    """Add the squares of a step to `halves` `[A, 2]`: their high parts and their low 24 bits."""
    for c in range(span[0], span[1]):
        high, low = np.int64(0), np.int64(0)
        for i in range(CHUNK):
            step = np.int64(moved[c, i]) - np.int64(theta[c, i])
            # |U| is below 2²⁸, so a square fits; the sum of an atom's squares would not.
            high += step * step >> _HALF_BITS
            low += step * step & _HALF_MASK
        halves[atom_C[c], 0] += high
        halves[atom_C[c], 1] += low


@compiled
def shorten(moved: Ints32, theta: Ints32, span: tuple[int, int], atom_C: Ints32, left_A: Ints) -> None:
    """moved ← θ + U · left / 2¹⁶, rounded towards θ."""
    for c in range(span[0], span[1]):
        left = left_A[atom_C[c]]
        for i in range(CHUNK):
            step = np.int64(moved[c, i]) - np.int64(theta[c, i])
            # Towards θ on both sides: what is to be shorter never grows.
            size = abs(step) * left >> _LEFT_BITS
            moved[c, i] = np.int32(np.int64(theta[c, i]) + (size if step >= 0 else -size))
