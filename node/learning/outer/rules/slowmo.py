"""Slow momentum: the mean goes into a heavy ball, and the ball moves the model.

    v ← βv + Δ        Θ ← Θ − αv

Source: Wang et al., SlowMo, arXiv 1910.00643, Algorithm 1; published: α = 1, β between 0.4 and 0.8. The paper
divides Δ by the inner learning rate γ and multiplies the step by it: the same while γ stays as it is.
Left out here.
"""

import numpy as np

from atoll.node.learning.kernels.compiled import Ints32, compiled
from atoll.node.learning.outer.rules.momentum import nearest, towards_zero


@compiled
def slowmo_step(
    theta_out: Ints32, v_out: Ints32, theta: Ints32, v: Ints32, toward: Ints32, alpha: int, beta: int
) -> bool:
    """One step of every value; see `momentum.Kernel`."""
    wrong = np.int64(0)
    for i in range(len(theta)):
        mean = np.int64(theta[i]) - np.int64(toward[i])
        speed = mean + towards_zero(np.int64(beta) * np.int64(v[i]))
        moved = np.int64(theta[i]) - nearest(np.int64(alpha) * speed, 8)
        theta_out[i], v_out[i] = np.int32(moved), np.int32(speed)
        # What the narrowing changed, gathered without a branch: 0 in the end means that every value fitted.
        wrong |= (moved ^ np.int64(np.int32(moved))) | (speed ^ np.int64(np.int32(speed)))
    return bool(wrong == 0)
