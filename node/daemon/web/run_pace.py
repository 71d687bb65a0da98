"""How fast the node passes through its run, and what of its state is an alarm. Pure."""

from collections.abc import Sequence

from atoll.node.daemon.web.measurements import SHARES
from atoll.node.daemon.web.page_data import Alarm, RunPace
from atoll.protocols.errors import counted
from atoll.protocols.local.control_messages import RoundStatus, Status
from atoll.protocols.local.durations import pace_s

PACE_ROUNDS = 20
"""The pace is that of so many of the newest rounds that this node trained."""
TRAINS = ("training", "collecting", "folding", "joining", "waiting for finality")
"""Activities in which the node takes part in rounds, so that a pace means something."""


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


def alarms_of(now: Status) -> tuple[Alarm, ...]:
    """What a user should see at once, the worst first."""
    found = [Alarm("bad", "trouble", now.trouble)] if now.trouble else []
    # Leases come with the first exchanges: a node that has just started has heard nobody yet.
    if now.members <= 1 and now.activity not in ("syncing", "done", "finished"):
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
