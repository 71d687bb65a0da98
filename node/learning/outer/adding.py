"""Compiled: sums of int32 arrays, checked for overflow, in one pass."""

import numpy as np
import numpy.typing as npt
from torch import Tensor

from atoll.node.learning.kernels.compiled import compiled

Ints = npt.NDArray[np.int32]


def add(out: Tensor, theta: Tensor, gain: Tensor, loss: Tensor | None) -> bool:
    """out ← θ + gain − loss, int32 of one size; False where a sum does not fit, and `out` is then undefined."""
    into, first, second = (part.numpy().reshape(-1) for part in (out, theta.contiguous(), gain.contiguous()))
    if loss is None:
        return bool(_sum(into, first, second))
    return bool(_sum_less(into, first, second, loss.contiguous().numpy().reshape(-1)))


@compiled
def _sum(out: Ints, theta: Ints, gain: Ints) -> bool:
    wrong = np.int64(0)
    for i in range(len(out)):
        total = np.int64(theta[i]) + np.int64(gain[i])
        out[i] = np.int32(total)
        wrong |= total ^ np.int64(out[i])
    return bool(wrong == 0)


@compiled
def _sum_less(out: Ints, theta: Ints, gain: Ints, loss: Ints) -> bool:
    wrong = np.int64(0)
    for i in range(len(out)):
        total = np.int64(theta[i]) + np.int64(gain[i]) - np.int64(loss[i])
        out[i] = np.int32(total)
        wrong |= total ^ np.int64(out[i])
    return bool(wrong == 0)
