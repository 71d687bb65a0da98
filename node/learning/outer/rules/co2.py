"""CO2's outer step: the mean of the round before, so that nobody has to wait for this round's.

    v ← clamp(βv + D/Λ, ±φ)        Θ ← Θ − αv        D ← Δ

D is the mean of the last round that was folded, 0 at first; the mean of a run's last round moves nothing. Source:
Sun et al., CO2, arXiv 2401.16265: one stale all-reduce, a penalty Λ on the staleness gap, and the clip φ of the
outer momentum. β = 0.5, α = 1, Λ = 1 and φ = 1 are the defaults of their code, where φ bounds each value. Their
code's clip has no effect (it drops what `clamp` returns); ours has one.

What is not here: the paper computes a penalty Λ_t in each round, from the state at which the round begins. Λ is a
constant of the run here, as in the authors' code (`co2_gap_penalty`). That code could be read in full, the paper's
formula of Λ_t could not. docs/outer-state.md says what a Λ_t would take.

This is CO2's trajectory. What hides the time of an exchange here is the overlap (docs/overlap.md): a member still
learns the view of a round when the round is folded, although this rule would let it know it before.

Bounds: β·256 ≤ 2⁸ and 256/Λ ≤ 2⁸, |v| and |D| ≤ 2³¹: all sums fit an int64; |v| ≤ φ < 2³¹ keeps v in int32.
"""

import numpy as np

from atoll.node.learning.kernels.compiled import Ints32, compiled
from atoll.node.learning.outer.rules.momentum import nearest, towards_zero


@compiled
def co2_step(
    theta_out: Ints32,
    v_out: Ints32,
    stale_out: Ints32,
    theta: Ints32,
    v: Ints32,
    stale: Ints32,
    toward: Ints32,
    alpha: int,
    beta: int,
    gap: int,
    most: int,
) -> bool:
    """One step of every value; see `momentum.Kernel`. `gap`: 256/Λ; `most`: φ in steps of 2⁻²⁴."""
    wrong = np.int64(0)
    for i in range(len(theta)):
        mean = np.int64(theta[i]) - np.int64(toward[i])
        # Both towards zero: a momentum that gets nothing ends, and −x mirrors x.
        speed = towards_zero(np.int64(beta) * np.int64(v[i])) + towards_zero(np.int64(gap) * np.int64(stale[i]))
        speed = min(max(speed, np.int64(-most)), np.int64(most))
        moved = np.int64(theta[i]) - nearest(np.int64(alpha) * speed, 8)
        theta_out[i], v_out[i], stale_out[i] = np.int32(moved), np.int32(speed), np.int32(mean)
        # What the narrowing changed, gathered without a branch: 0 in the end means that every value fitted.
        wrong |= (moved ^ np.int64(np.int32(moved))) | (mean ^ np.int64(np.int32(mean)))
    return bool(wrong == 0)
