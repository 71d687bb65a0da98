"""How fast the node passes through its run, and what of its state is an alarm. Pure but for StillWatch."""

from collections.abc import Sequence

from atoll.node.daemon.web.metrics import SHARES
from atoll.node.daemon.web.page_data import Alarm, RunPace
from atoll.protocols.errors import counted
from atoll.protocols.local.control_messages import RoundStatus, Status
from atoll.protocols.local.durations import pace_s

PACE_ROUNDS = 20
"""The pace is that of so many of the newest rounds that this node trained."""
FROZEN_LEAST_S = 60.0
FROZEN_ROUNDS = 5.0
"""A node is frozen when nothing moved for so many of its rounds, and for FROZEN_LEAST_S."""
FROZEN_UNKNOWN_S = 300.0
"""The same before its pace is known: one step of a large model takes minutes on a slow machine."""
FETCHES = ("syncing", "catching up")
"""Activities in which the node waits for what others have."""
AT_REST = ("paused", "observing", "gathering", "done", "finished")
"""Activities in which nothing needs to move."""
TRAINS = ("training", "collecting", "folding", "joining", "waiting for finality")
"""Activities in which the node takes part in rounds, so that a pace means something."""


class StillWatch:
    """Remembers when the node's progress last changed."""

    def __init__(self) -> None:
        self._seen: tuple[object, ...] = ()
        self._since_s = 0.0

    def still_s(self, now: Status, clock_s: float) -> float:
        """Seconds since round, step, final round or activity changed, by the calls so far.

        A node that fetches the run's state moves as long as bytes come.
        """
        fetched = now.bytes_down if now.activity in FETCHES else 0
        seen = (now.pid, now.round, now.step, now.final, now.activity, fetched)
        if seen != self._seen:
            self._seen, self._since_s = seen, clock_s
        return clock_s - self._since_s


def seconds_of(row: RoundStatus) -> float:
    """Seconds from the start of the round's training to that of the next one."""
    total: float = sum(getattr(row, share) for share in SHARES)
    return total


def pace_of(now: Status, rows: Sequence[RoundStatus], still_s: float) -> RunPace:
    """The pace and the time left. `rows`: the newest rounds, oldest first."""
    trained = [row for row in rows if row.payload_bytes and row.round < now.round and seconds_of(row) > 0]
    spent = [seconds_of(row) for row in trained[-PACE_ROUNDS:]]
    round_s = pace_s(spent) if len(spent) >= 2 else None
    return RunPace(round_s=round_s, left_s=_left_s(now, rows, round_s), still_s=still_s)


def alarms_of(now: Status, pace: RunPace) -> tuple[Alarm, ...]:
    """What a user should see at once, the worst first."""
    found = [Alarm("bad", "trouble", now.trouble)] if now.trouble else []
    limit_s = max(FROZEN_LEAST_S, FROZEN_ROUNDS * pace.round_s) if pace.round_s else FROZEN_UNKNOWN_S
    if now.activity not in AT_REST and pace.still_s > limit_s:
        why = f" ({now.reason})" if now.reason else ""
        found.append(Alarm("bad", "frozen", f"no step and no round for {pace.still_s:.0f} s{why}"))
    if now.members <= 1 and now.activity not in ("done", "finished"):
        text = f"no other member trains this run; connected to {counted(now.peers, 'peer')}"
        found.append(Alarm("warn", "alone", text))
    return tuple(found)


def _left_s(now: Status, rows: Sequence[RoundStatus], round_s: float | None) -> float | None:
    if now.activity in ("done", "finished"):
        return 0.0
    if round_s is None or now.activity not in TRAINS:
        return None
    spent_s = sum(seconds_of(row) for row in rows if row.round == now.round)
    return max(0.0, (now.rounds - now.round) * round_s - min(spent_s, round_s))
