"""Accounts for a node's time: totals since its start, and the last minutes. Pure: time is an argument.

The worker's own account (`TimeSpent`) comes with its replies. Two things only the daemon knows: what an idle
worker waits for (collector.py), and when there was no worker at all (`down`).
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from copy import copy
from typing import Literal

from msgspec.structs import astuple

from atoll.protocols.local.control_messages import Goodput, TimeShares
from atoll.protocols.local.time_spent import TimeSpent

WINDOW_S = 600.0
SLICE_S = 10.0
"""The window moves by slices of this length."""
_BEGUN = TimeSpent()
"""The account of a worker process that has only just begun."""

IdleReason = Literal["transfer", "wait"]


NAMES = TimeShares.__struct_fields__


def total_s(shares: TimeShares) -> float:
    """The sum of all entries, seconds."""
    return math.fsum(astuple(shares))


def add(into: TimeShares, shares: TimeShares) -> None:
    """Add each entry of `shares` to the attribute of the same name."""
    for name in NAMES:
        setattr(into, name, getattr(into, name) + getattr(shares, name))


def move_to_recompute(newest_first: Iterable[TimeShares], lost_s: float) -> float:
    """Move `lost_s` seconds of steps that were in vain to `recompute`, newest entries first; returns the rest."""
    for entry in newest_first:
        if lost_s <= 0.0:
            break
        here_s = min(lost_s, entry.steps_s)
        entry.steps_s -= here_s
        entry.recompute_s += here_s
        lost_s -= here_s
    return lost_s


def between(before: TimeSpent, after: TimeSpent, transfer_share: float) -> tuple[TimeShares, float]:
    """What one worker did between two readings, and the seconds of steps that turned out to be in vain.

    Those seconds are still among the steps here, because the caller knows which entries had them.
    `transfer_share` is the part of idle time that waited for bytes.
    """
    lost_s = (after.recompute_ns - before.recompute_ns) / 1e9
    gone_s = {
        name: (getattr(after, f"{name}_ns") - getattr(before, f"{name}_ns")) / 1e9
        for name in ("start", "steps", "wait", "encode", "fold", "checkpoint", "evaluate", "audit")
    }
    idle_s, steps_s = gone_s.pop("wait"), gone_s.pop("steps")
    transfer_s = idle_s * transfer_share
    shares = TimeShares(
        **{f"{name}_s": value_s for name, value_s in gone_s.items()},
        steps_s=steps_s + lost_s,
        transfer_s=transfer_s,
        wait_s=idle_s - transfer_s,
    )
    return shares, lost_s


class GoodputAccount:
    """The time of one daemon, over all processes of its worker."""

    def __init__(self, began: float, on_entry: Callable[[TimeShares, float], None]) -> None:
        """`on_entry` is called with each entry: its shares, and seconds of earlier steps that were in vain."""
        self._on_entry = on_entry
        self._total = TimeShares()
        self._slices: deque[tuple[float, TimeShares]] = deque()
        self._last: TimeSpent | None = None
        self._until = began
        self._idle: IdleReason | None = None
        self._idle_since = began
        self._idle_s = {"transfer": 0.0, "wait": 0.0}

    def set_idle_reason(self, idle: IdleReason | None, now: float) -> None:
        """Record what an idle worker waits for from now on; None while it should not be idle."""
        if self._idle is not None:
            self._idle_s[self._idle] += now - self._idle_since
        self._idle = idle
        self._idle_since = now

    def add_reading(self, spent: TimeSpent, now: float) -> None:
        """Record how the worker spent its life so far; an empty account means that its process has just begun."""
        self._add(self._gap(now, spent.age_ns / 1e9), 0.0, now)
        self._add(*between(self._last or _BEGUN, spent, self._transfer_share()), now)
        self._last = spent
        self._until = now

    def end_worker(self, now: float) -> None:
        """The worker ended: the steps that it had not saved are lost, and it was down from its last reading on."""
        gap = self._gap(now, 0.0)
        self._add(gap, self._last.unsaved_ns / 1e9 if self._last else 0.0, now)
        self._last = None
        self._until += total_s(gap)

    def report(self, now: float) -> Goodput:
        """Totals and window up to the newest reading, or up to now if no worker has given one."""
        gap, total, window = self._gap(now, 0.0), copy(self._total), TimeShares()
        add(total, gap)
        self._forget(now)
        for shares in (gap, *(shares for _, shares in self._slices)):
            add(window, shares)
        return Goodput(window_s=total_s(window), window=window, total=total)

    def _gap(self, now: float, age_s: float) -> TimeShares:
        """The time up to `age_s` ago that no reading covers: without a worker, or while its process started."""
        gone_s = max(0.0, now - self._until - age_s)
        if self._last is None:
            return TimeShares(down_s=gone_s)
        return TimeShares(start_s=gone_s) if self._last == _BEGUN else TimeShares()

    def _transfer_share(self) -> float:
        """Part of the idle time since the last reading that waited for a transfer."""
        seen_s = sum(self._idle_s.values())
        share = self._idle_s["transfer"] / seen_s if seen_s > 0.0 else float(self._idle == "transfer")
        self._idle_s = {"transfer": 0.0, "wait": 0.0}
        return share

    def _add(self, shares: TimeShares, lost_s: float, now: float) -> None:
        if not self._slices or now - self._slices[-1][0] >= SLICE_S:
            self._slices.append((now, TimeShares()))
            self._forget(now)
        for into in (self._total, self._slices[-1][1]):
            add(into, shares)
        move_to_recompute([self._total], lost_s)
        move_to_recompute((part for _, part in reversed(self._slices)), lost_s)
        self._on_entry(shares, lost_s)

    def _forget(self, now: float) -> None:
        while self._slices and now - self._slices[0][0] > WINDOW_S:
            self._slices.popleft()
