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
    holds: bool | None
    """None: it was not measured, which is no pass."""

    def __str__(self) -> str:
        verdict = {True: "pass", False: "MISS", None: "NOT RUN"}[self.holds]
        return f"{verdict:<7}  {self.case:<44} {self.bar:<34} {self.measured}"


def spread(seconds: Sequence[float]) -> str:
    """`p50 0.31 s, max 0.44 s`; a dash without figures."""
    if not seconds:
        return "–"
    return f"p50 {statistics.median(seconds):.2f} s, max {max(seconds):.2f} s"
