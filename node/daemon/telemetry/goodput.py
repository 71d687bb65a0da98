"""Where a node's time goes: the totals since its start and the last minutes. Pure: time is an argument.

The worker's own books (`protocols.worker.Spent`) come with its replies. Two things only the daemon knows:
what an idle worker waits for (node/daemon/telemetry/idle_reason.py), and when there was no worker at all (`down`).
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal, Protocol

from atoll.protocols.local.control_messages import Goodput, TimeShares
from atoll.protocols.local.worker_messages import TimeSpent

WINDOW_S = 600.0
SLICE_S = 10.0
"""The window moves in steps of this."""
BEFORE = TimeSpent()
"""The books of a worker that has not begun."""

Idle = Literal["transfer", "wait"]


class Stepped(Protocol):
    """What holds steps that may turn out to be in vain."""

    steps_s: float
    recompute_s: float


@dataclass(slots=True)
class Shares:
    """Seconds by what they went into."""

    steps_s: float = 0.0
    wait_s: float = 0.0
    transfer_s: float = 0.0
    encode_s: float = 0.0
    fold_s: float = 0.0
    checkpoint_s: float = 0.0
    evaluate_s: float = 0.0
    recompute_s: float = 0.0
    start_s: float = 0.0
    down_s: float = 0.0


NAMES = tuple(field.name for field in fields(Shares))


def total_s(shares: Shares) -> float:
    """All of it."""
    return math.fsum(asdict(shares).values())


def add(into: object, shares: Shares) -> None:
    """Add each entry of `shares` to the attribute of the same name."""
    for name in NAMES:
        setattr(into, name, getattr(into, name) + getattr(shares, name))


def take_back(newest_first: Iterable[Stepped], lost_s: float) -> float:
    """Steps that were in vain become `recompute` where they were booked. Returns what was found nowhere."""
    for one in newest_first:
        if lost_s <= 0.0:
            break
        here_s = min(lost_s, one.steps_s)
        one.steps_s -= here_s
        one.recompute_s += here_s
        lost_s -= here_s
    return lost_s


def between(before: TimeSpent, after: TimeSpent, transfer_share: float) -> tuple[Shares, float]:
    """What was done between two readings of one worker, and the seconds of steps that it took back.

    Steps that it took back are still among the steps here: who booked them knows where.
    """
    lost_s = (after.recompute_ns - before.recompute_ns) / 1e9
    gone_s = {
        name: (getattr(after, f"{name}_ns") - getattr(before, f"{name}_ns")) / 1e9
        for name in ("start", "steps", "wait", "encode", "fold", "checkpoint", "evaluate")
    }
    idle_s, steps_s = gone_s.pop("wait"), gone_s.pop("steps")
    transfer_s = idle_s * transfer_share
    shares = Shares(
        **{f"{name}_s": value_s for name, value_s in gone_s.items()},
        steps_s=steps_s + lost_s,
        transfer_s=transfer_s,
        wait_s=idle_s - transfer_s,
    )
    return shares, lost_s


class Books:
    """One daemon's time, over all lives of its worker."""

    def __init__(self, began: float, spend: Callable[[Shares, float], None]) -> None:
        """`spend` hears of every entry: shares, then seconds of earlier steps that were in vain."""
        self._spend = spend
        self._total = Shares()
        self._slices: deque[tuple[float, Shares]] = deque()
        self._last: TimeSpent | None = None
        self._until = self._looked_at = began
        self._idle: Idle | None = None
        self._weights = {"transfer": 0.0, "wait": 0.0}

    def look(self, idle: Idle | None, now: float) -> None:
        """From now on an idle worker waits for this; None: it is not expected to be idle."""
        if self._idle is not None:
            self._weights[self._idle] += now - self._looked_at
        self._idle, self._looked_at = idle, now

    def read(self, spent: TimeSpent, now: float) -> None:
        """How the worker spent its life so far; nothing at all: its process has only just begun."""
        self._book(self._gap(now, spent.age_ns / 1e9), 0.0, now)
        self._book(*between(self._last or BEFORE, spent, self._transfer_share()), now)
        self._last, self._until = spent, now

    def worker_gone(self, now: float) -> None:
        """The worker ended. The steps that it had not saved are lost; from its last word on it was down."""
        gap = self._gap(now, 0.0)
        self._book(gap, self._last.unsaved_ns / 1e9 if self._last else 0.0, now)
        self._last, self._until = None, self._until + total_s(gap)

    def report(self, now: float) -> Goodput:
        """Up to the newest reading; without books of a worker, up to now."""
        gap, total, window = self._gap(now, 0.0), replace(self._total), Shares()
        add(total, gap)
        self._forget(now)
        for shares in (gap, *(shares for _, shares in self._slices)):
            add(window, shares)
        shown = (TimeShares(**asdict(shares)) for shares in (window, total))
        return Goodput(window_s=total_s(window), window=next(shown), total=next(shown))

    def _gap(self, now: float, age_s: float) -> Shares:
        """The time that no books cover: no worker, or one that has not opened them, `age_s` ago."""
        gone_s = max(0.0, now - self._until - age_s)
        if self._last is None:
            return Shares(down_s=gone_s)
        return Shares(start_s=gone_s) if self._last == BEFORE else Shares()

    def _transfer_share(self) -> float:
        seen_s = sum(self._weights.values())
        share = self._weights["transfer"] / seen_s if seen_s > 0.0 else float(self._idle == "transfer")
        self._weights = {"transfer": 0.0, "wait": 0.0}
        return share

    def _book(self, shares: Shares, lost_s: float, now: float) -> None:
        if not self._slices or now - self._slices[-1][0] >= SLICE_S:
            self._slices.append((now, Shares()))
            self._forget(now)
        for into in (self._total, self._slices[-1][1]):
            add(into, shares)
        take_back([self._total], lost_s)
        take_back((part for _, part in reversed(self._slices)), lost_s)
        self._spend(shares, lost_s)

    def _forget(self, now: float) -> None:
        while self._slices and now - self._slices[0][0] > WINDOW_S:
            self._slices.popleft()
