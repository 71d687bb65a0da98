"""How fast memory and descriptors grow, with the error of that, and what may be said of it. Pure.

Least squares over block means, with a level of its own for each life of a process. Samples that follow each
other are alike, and would make a line look surer than it is: blocks are less so. The interval is of 95 %, by
Student's t. The warm-up is counted in rounds: tables of so many rounds fill by rounds, not by minutes.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from statistics import fmean
from typing import Literal, NamedTuple

BLOCKS = 12
"""Into which the time of all samples is cut."""
LEAST_S = 2400.0
"""Measured time below which nothing passes: minutes cannot say what grows in an hour."""
LEAK_S = 300.0
"""Measured time below which nothing fails: what grows then belongs to the start."""
HOUR_S = 3600.0
NORMAL = 1.959964

Said = Literal["flat", "grows", "unsure"]


class Sample(NamedTuple):
    """One look at one node."""

    at_s: float
    node: int
    life: tuple[int, ...]
    """Ids of its processes: another one is another life."""
    rounds: int
    """Its newest final round."""
    values: Mapping[str, float]
    """By what is measured."""


class Slope(NamedTuple):
    """Growth in an hour; the true one is within `error` of it in 95 of 100 cases."""

    per_h: float
    error: float
    measured_s: float

    def said(self, bar: float) -> Said:
        """Whether it is below the bar, above it, or neither can be said."""
        if self.per_h - self.error > bar and self.measured_s >= LEAK_S:
            return "grows"
        return "flat" if self.per_h + self.error < bar and self.measured_s >= LEAST_S else "unsure"

    def text(self, unit: str) -> str:
        return f"{self.per_h:+.1f} ± {self.error:.1f} {unit}/h"


def slope(samples: Sequence[Sample], what: str, warm_rounds: int) -> Slope:
    """The growth of `what` of one node, without the first `warm_rounds` rounds of each life."""
    lives = [warm for life in _lives(samples) if (warm := warmed(life, warm_rounds))]
    measured_s = sum(life[-1].at_s - life[0].at_s for life in lives)
    block_s = measured_s / BLOCKS
    points = [_means(life, what, block_s) for life in lives] if block_s else []
    spread = sum((x - _mean_x(life)) ** 2 for life in points for x, _ in life)
    free = sum(map(len, points)) - len(points) - 1
    if free < 1 or not spread:
        return Slope(0.0, math.inf, measured_s)
    per_s = sum((x - _mean_x(life)) * y for life in points for x, y in life) / spread
    left = sum(
        (y - fmean(y for _, y in life) - per_s * (x - _mean_x(life))) ** 2 for life in points for x, y in life
    )
    error = student(free) * math.sqrt(left / free / spread)
    return Slope(per_s * HOUR_S, error * HOUR_S, measured_s)


def verdict(said: Iterable[Said]) -> Said:
    """Of several: one that grows is enough to fail, and one that is not sure is enough not to pass."""
    found = set(said)
    return "grows" if "grows" in found else "unsure" if "unsure" in found or not found else "flat"


def student(free: int) -> float:
    """Quantile 97.5 % of Student's t (Cornish and Fisher); exact for 1 and 2."""
    if free <= 2:
        return (12.706, 4.303)[free - 1]
    z = NORMAL
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * free**3)
    return z + (z**3 + z) / (4 * free) + second + third


def warmed(life: Sequence[Sample], warm_rounds: int) -> list[Sample]:
    """The samples of one life from so many rounds after its first one on."""
    return [sample for sample in life if sample.rounds >= life[0].rounds + warm_rounds]


def _lives(samples: Sequence[Sample]) -> list[list[Sample]]:
    return [list(life) for _, life in groupby(samples, key=lambda sample: sample.life)]


def _means(life: Sequence[Sample], what: str, block_s: float) -> list[tuple[float, float]]:
    blocks = groupby(life, key=lambda sample: int((sample.at_s - life[0].at_s) / block_s))
    found = [[(sample.at_s, sample.values[what]) for sample in block] for _, block in blocks]
    return [(fmean(x for x, _ in block), fmean(y for _, y in block)) for block in found]


def _mean_x(life: Sequence[tuple[float, float]]) -> float:
    return fmean(x for x, _ in life)
