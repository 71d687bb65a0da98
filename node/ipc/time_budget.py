"""How often something may be done that should take a small share of the time. Pure: the time is an argument."""

import math
from dataclasses import dataclass


@dataclass(slots=True)
class TimeBudget:
    """At most `share` of the time, over a while; the first one is free."""

    share: float
    _next_s: float = -math.inf

    def is_due(self, now: float) -> bool:
        """Whether it may be done at `now` (monotonic seconds)."""
        return now >= self._next_s

    def asked(self) -> None:
        """It was begun: none is due before it is known what it takes."""
        self._next_s = math.inf

    def took(self, now: float, took_s: float) -> None:
        """The one that ended at `now` took so long."""
        self._next_s = now + took_s / self.share
