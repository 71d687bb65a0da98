"""Rows of the rig's report: a figure, its bar, and whether it holds."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One line of the report."""

    case: str
    bar: str
    measured: str
    holds: bool

    def __str__(self) -> str:
        return f"{'pass' if self.holds else 'MISS'}  {self.case:<44} {self.bar:<34} {self.measured}"


def spread(seconds: Sequence[float]) -> str:
    """`p50 0.31 s, max 0.44 s`; a dash without figures."""
    if not seconds:
        return "–"
    return f"p50 {statistics.median(seconds):.2f} s, max {max(seconds):.2f} s"
