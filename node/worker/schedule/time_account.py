"""The worker's account of time: at each moment it does exactly one thing, and the account has an entry for each.

Pure: the clock comes from outside. Whole nanoseconds, so that the entries add up to the age exactly.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from atoll.protocols.local.durations import STEP_BOUNDS_S, DurationCounts
from atoll.protocols.local.time_spent import TimeSpent

Doing = Literal["start", "steps", "encode", "fold", "checkpoint", "evaluate", "audit", "recompute", "wait"]

_BESIDES: tuple[Doing, ...] = ("evaluate", "audit")


class TimeAccount:
    """Begins in `start`; `enter` and `within` name what comes next."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        """`now_ns`: a clock that never goes back."""
        self._now_ns = now_ns
        self._since_ns = now_ns()
        self._doing: Doing = "start"
        self._booked_ns: dict[Doing, int] = {}
        self._unsaved_ns = 0
        self._saving_ns = 0
        self._each_step_ns = 0
        self._step_counts = DurationCounts(STEP_BOUNDS_S)

    def enter(self, doing: Doing) -> None:
        """Book the time since the last call, and that the worker does this from now on."""
        now_ns = self._now_ns()
        gone_ns, self._since_ns = now_ns - self._since_ns, now_ns
        self._booked_ns[self._doing] = self._booked_ns.get(self._doing, 0) + gone_ns
        if self._doing == "steps":
            self._unsaved_ns += gone_ns
        self._doing = doing

    @contextmanager
    def within(self, doing: Doing) -> Iterator[None]:
        """Book the block's time under `doing`, and go on with what was before."""
        before = self._doing
        self.enter(doing)
        try:
            yield
        finally:
            self.enter(before)

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """Count the block's duration as that of one inner step."""
        began_ns = self._now_ns()
        yield
        took_ns = self._now_ns() - began_ns
        self._each_step_ns += took_ns
        self._step_counts.add(took_ns / 1e9)

    @property
    def besides_s(self) -> float:
        """Seconds, up to now, of what is no part of any round."""
        self.enter(self._doing)
        return sum(self._booked_ns.get(doing, 0) for doing in _BESIDES) / 1e9

    def begin_save(self) -> None:
        """The steps so far are being saved: see `confirm_saved`."""
        self.enter(self._doing)
        self._saving_ns += self._unsaved_ns
        self._unsaved_ns = 0

    def confirm_saved(self) -> None:
        """The save has ended well: its steps cannot be lost any more."""
        self._saving_ns = 0

    def discard(self) -> None:
        """The steps since the last `begin_save` are thrown away: their time is booked as `recompute`."""
        self.enter(self._doing)
        self._booked_ns["steps"] = self._booked_ns.get("steps", 0) - self._unsaved_ns
        self._booked_ns["recompute"] = self._booked_ns.get("recompute", 0) + self._unsaved_ns
        self._unsaved_ns = 0

    def read(self) -> TimeSpent:
        """All entries up to now."""
        self.enter(self._doing)
        booked_ns = {f"{doing}_ns": value_ns for doing, value_ns in self._booked_ns.items()}
        return TimeSpent(
            **booked_ns,
            unsaved_ns=self._unsaved_ns + self._saving_ns,
            each_step_ns=self._each_step_ns,
            step_counts=tuple(self._step_counts.counts) if self._each_step_ns else (),
        )
