"""Inner steps one after the other, as a round takes them."""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

Step = Callable[[NDArray[np.int64], int], float]
"""Takes a step from its windows `[B, T + 1]` and its global number; returns the loss before it."""


def run_steps(
    step: Step, batch_of: Callable[[int], NDArray[np.int64]], first_step: int, steps: int
) -> Iterator[float]:
    """Take `steps` steps from global step `first_step`, yielding each loss so that the caller can serve its pipe.

    `batch_of(i)` returns the windows of the round's i-th step. If the caller stops early, the module stays as the
    last yielded step left it.
    """
    for i in range(steps):
        yield step(batch_of(i), first_step + i)
