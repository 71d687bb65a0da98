"""What a bench hands back: rows with a figure each, and the bar that a figure must reach."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec


class Row(msgspec.Struct, frozen=True):
    """One figure. `value` None: not measured, and `note` says why. `passed` None: there is nothing to judge."""

    metric: str
    value: float | None
    unit: str
    bar: str | None = None
    """`>= 2`, `<= 250`; in the unit of the value."""
    passed: bool | None = msgspec.field(default=None, name="pass")
    note: str = ""


@dataclass(frozen=True, slots=True)
class Bar:
    """A value must be at least, or at most, `limit`."""

    sense: Literal[">=", "<="]
    limit: float

    def __str__(self) -> str:
        return f"{self.sense} {self.limit:g}"

    def holds(self, value: float) -> bool:
        """Whether `value` reaches it."""
        return value >= self.limit if self.sense == ">=" else value <= self.limit


def row(metric: str, value: float | None, unit: str, bar: Bar | None = None, *, note: str = "") -> Row:
    """A row, judged. A value that is None is neither good nor bad."""
    passed = None if bar is None or value is None else bar.holds(value)
    return Row(metric, value, unit, None if bar is None else str(bar), passed, note)


def unjudged(rows: Sequence[Row]) -> list[Row]:
    """The same rows, of a run that is too short to judge anything."""
    return [msgspec.structs.replace(given, passed=None) for given in rows]


def all_reached(rows: Sequence[Row]) -> bool:
    """Whether every bar was reached; what was not measured did not reach it."""
    return all(given.passed for given in rows if given.bar is not None)


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Median of the ratios of repetitions that were made one after the other; None where there is nothing."""
    pairs = [mine / other for mine, other in zip(ours, theirs, strict=False) if other > 0]
    return statistics.median(pairs) if pairs else None


def median(values: Sequence[float]) -> float | None:
    """None where there is nothing."""
    return statistics.median(values) if values else None
