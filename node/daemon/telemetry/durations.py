"""Counts how long inner steps, rounds and answers of peers take, since the start of the daemon."""

from collections.abc import Callable, Mapping
from typing import Any

from atoll.protocols.local import durations
from atoll.protocols.local.durations import DurationCounts
from atoll.protocols.local.time_spent import TimeSpent


class NodeDurations:
    """Adds up readings of the worker and events of the round log."""

    def __init__(self, now: Callable[[], float]) -> None:
        """`now` is a clock in seconds."""
        self._now = now
        self.steps = DurationCounts(durations.STEP_BOUNDS_S)
        self.rounds = DurationCounts(durations.ROUND_BOUNDS_S)
        """From the start of a round's training to that of the next round, pauses included."""
        self.round_trips = DurationCounts(durations.ROUND_TRIP_BOUNDS_S)
        """Of requests to peers that were answered."""
        self._seen = TimeSpent()
        self._training: tuple[int, float] | None = None

    def on_spent(self, spent: TimeSpent) -> None:
        """Count the inner steps since the last reading; an empty account means that a process has just begun."""
        if spent.step_counts:
            before = self._seen.step_counts or (0,) * len(spent.step_counts)
            new = [now - then for now, then in zip(spent.step_counts, before, strict=True)]
            self.steps.add_counts(new, (spent.each_step_ns - self._seen.each_step_ns) / 1e9)
        self._seen = spent

    def on_event(self, name: str, facts: Mapping[str, Any]) -> None:
        """Count a round when the training of a later one starts. A round whose training starts again is one."""
        if name != "training":
            return
        number, began = self._training or (facts["round"], self._now())
        if facts["round"] != number:
            self.rounds.add(self._now() - began)
            number, began = facts["round"], self._now()
        self._training = number, began
