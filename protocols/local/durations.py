"""Durations counted by size: what a process measures, and what the metrics show as a histogram."""

from bisect import bisect_left
from collections.abc import Sequence
from statistics import fmean, median
from typing import Final

MEAN_OF = 8
"""Fewest durations whose mean is a pace: of fewer, one that was disturbed would be most of it."""
LONGEST_MEDIANS = 8.0
"""A duration counts as no more medians than this: a laptop that slept for a night is not the pace of its run."""
STEP_BOUNDS_S: Final = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Of an inner step: from a model of a test to one that is too large for its machine."""
ROUND_BOUNDS_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0)
"""Of a round: the presets aim at minutes, the tests at seconds."""
ROUND_TRIP_BOUNDS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 20.0)
"""Of a question to a peer and its answer: from loopback to a relay on the other side of the world."""


def pace_s(took_s: Sequence[float]) -> float:
    """Seconds that the next round takes on average, by those that the newest took; of few, their median.

    Rounds are uneven and the slow ones are far from the middle, so a median would promise too short a run.
    """
    middle_s = median(took_s)
    if len(took_s) < MEAN_OF:
        return middle_s
    return fmean(min(each_s, LONGEST_MEDIANS * middle_s) for each_s in took_s)


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
