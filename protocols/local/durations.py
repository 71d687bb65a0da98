"""Durations counted by size: what a process measures, and what the metrics show as a histogram."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

STEP_BOUNDS_S: Final = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Of an inner step: from a model of a test to one that is too large for its machine."""
ROUND_BOUNDS_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0)
"""Of a round: the presets aim at minutes, the tests at seconds."""
ROUND_TRIP_BOUNDS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 20.0)
"""Of a question to a peer and its answer: from loopback to a relay on the other side of the world."""


class DurationCounts:
    """How many durations were no longer than each bound, in seconds. It holds counts, so its size never grows."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        """`bounds_s` rise. The last count is of durations above all of them."""
        self.bounds_s = tuple(bounds_s)
        self.counts = [0] * (len(self.bounds_s) + 1)
        """Durations by size: each in the first bucket whose bound it does not exceed."""
        self.total_s = 0.0

    def add(self, duration_s: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(self.bounds_s, duration_s)] += 1
        self.total_s += duration_s

    def add_counts(self, counts: Sequence[int], total_s: float) -> None:
        """Count what another process counted with the same bounds."""
        self.counts = [mine + more for mine, more in zip(self.counts, counts, strict=True)]
        self.total_s += total_s
