"""The average of a run's newest final states, for exports: an exponential moving average in exact integers.

    E ← E + round((Θ − E) / K)        after each final round, K the rounds over which it averages

Rounding stops it K / 2 units of 2⁻²⁴ before a Θ that does not move. At a stable learning rate Θ moves to and fro
around E, and E has the lower loss (docs/inner-optimizer.md). It is a node's own: no peer sees it, and nothing that
is agreed depends on it.
"""

import torch
from torch import Tensor

from atoll.node.learning.kernels.compiled import Fresh, fresh_like
from atoll.node.learning.outer.fixed import SLAB_CHUNKS


class StateAverage:
    """E of the final states that this node saw one after the other; a gap begins it anew."""

    def __init__(self, rounds: int = 0, fresh: Fresh = fresh_like) -> None:
        """`rounds`: K; 0: no average is made. `fresh` makes its arrays."""
        self._rounds = rounds
        self._fresh = fresh
        self._values: Tensor | None = None
        self._number = -1

    @property
    def values_C4096(self) -> Tensor | None:
        """E, int32, never changed in place; None where there is none."""
        return self._values

    def add(self, theta_C4096: Tensor, number: int) -> None:
        """Θ_final of round `number` follows that of the round before. The same round again changes nothing."""
        if not self._rounds or (self._values is not None and number == self._number):
            return
        is_next = self._values is not None and number == self._number + 1
        self._values = self._moved(self._values, theta_C4096) if is_next else self._begun(theta_C4096)
        self._number = number

    def load(self, values_C4096: Tensor, number: int) -> None:
        """Go on from what was saved with Θ_final of round `number`."""
        if self._rounds:
            self._values, self._number = values_C4096, number

    def _begun(self, theta_C4096: Tensor) -> Tensor:
        return self._fresh(theta_C4096).copy_(theta_C4096)

    def _moved(self, average_C4096: Tensor | None, theta_C4096: Tensor) -> Tensor:
        assert average_C4096 is not None
        moved_C4096 = self._fresh(theta_C4096)
        for start in range(0, len(theta_C4096), SLAB_CHUNKS):
            rows = slice(start, start + SLAB_CHUNKS)
            old = average_C4096[rows].to(torch.int64)
            # Between E and Θ, so it fits; (2·d + K) // 2K is d / K to the nearest integer, halves up.
            twice = 2 * (theta_C4096[rows] - old) + self._rounds
            moved_C4096[rows] = old + torch.div(twice, 2 * self._rounds, rounding_mode="floor")
        return moved_C4096
