"""DiLoCo's outer step: SGD with Nesterov momentum.

    v ← βv + Δ        Θ ← Θ − α(Δ + βv)

Source: Douillard et al., DiLoCo, arXiv 2311.08105, Algorithm 1; published: α = 0.7, β = 0.9. The step is rounded
once, to the nearest, halves away from zero.
"""

import numpy as np

from atoll.node.learning.kernels.compiled import Ints32, compiled
from atoll.node.learning.outer.rules.momentum import nearest, towards_zero


@compiled
def nesterov_step(
    theta_out: Ints32, v_out: Ints32, theta: Ints32, v: Ints32, toward: Ints32, alpha: int, beta: int
) -> bool:
    """One step of every value; see `momentum.Kernel`."""
    wrong = np.int64(0)
    for i in range(len(theta)):
        mean = np.int64(theta[i]) - np.int64(toward[i])
        speed = mean + towards_zero(np.int64(beta) * np.int64(v[i]))
        moved = np.int64(theta[i]) - nearest(np.int64(alpha) * (256 * mean + np.int64(beta) * speed), 16)
        theta_out[i], v_out[i] = np.int32(moved), np.int32(speed)
        # What the narrowing changed, gathered without a branch: 0 in the end means that every value fitted.
        wrong |= (moved ^ np.int64(np.int32(moved))) | (speed ^ np.int64(np.int32(speed)))
    return bool(wrong == 0)
