"""How often a node validates its view: every few rounds, or as often as it costs little. Pure."""

import math
from dataclasses import dataclass

SHARE = 0.01
"""Of the time, at most, goes into validation where the user names no number of rounds."""


@dataclass(slots=True)
class EvalPace:
    """`every`: rounds from one validation to the next; 0: as SHARE allows. The last round is always validated."""

    every: int
    rounds: int
    _next_s: float = 0.0

    def is_due(self, number: int, now: float) -> bool:
        """Whether round `number`, which has closed, is to be validated at `now` (monotonic seconds)."""
        if number == self.rounds - 1:
            return True
        return number % self.every == 0 if self.every else now >= self._next_s

    def asked(self) -> None:
        """A validation was asked for: none is due before it is known what it takes."""
        self._next_s = math.inf

    def took(self, now: float, took_s: float) -> None:
        """The validation that ended at `now` took so long."""
        self._next_s = now + took_s / SHARE
