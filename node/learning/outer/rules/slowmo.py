"""Slow momentum: the mean goes into a heavy ball, and the ball moves the model.

    v ← βv + Δ        Θ ← Θ − αv

Source: Wang et al., SlowMo, arXiv 1910.00643, Algorithm 1; published: α = 1, β between 0.4 and 0.8. The paper
divides Δ by the inner learning rate γ and multiplies the step by it: the same while γ stays as it is.
Left out here.
"""

import numpy as np

from atoll.node.learning.kernels.compiled import Ints32, compiled


@compiled
def slowmo_step(
    theta_out: Ints32, v_out: Ints32, theta: Ints32, v: Ints32, toward: Ints32, alpha: int, beta: int
) -> bool:
    """One step of every value; see `momentum.Kernel`."""
    wrong = np.int64(0)
    for i in range(len(theta)):
        mean = np.int64(theta[i]) - np.int64(toward[i])
        old = np.int64(beta) * np.int64(v[i])
        # On the magnitude: a shift of a negative number would round away from zero.
        speed = mean + (old >> 8 if old >= 0 else -(-old >> 8))
        top = np.int64(alpha) * speed
        size = (abs(top) + (1 << 7)) >> 8
        moved = np.int64(theta[i]) - (size if top >= 0 else -size)
        theta_out[i], v_out[i] = np.int32(moved), np.int32(speed)
        # What the narrowing changed, gathered without a branch: 0 in the end means that every value fitted.
        wrong |= (moved ^ np.int64(theta_out[i])) | (speed ^ np.int64(v_out[i]))
    return bool(wrong == 0)
