"""The part of `bench experts` in which an owner dies: four real nodes on loopback share a small mixture's experts.

One is killed (SIGKILL), started again five rounds later, and killed for good: nodes as `atoll sim` starts them.
"""

import asyncio
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from atoll.cli.sim.swarm import Swarm, prepare, start
from atoll.node.config.home import Home
from atoll.node.daemon.telemetry.round_log import RoundLog
from atoll.protocols.errors import LocalFault
from atoll.protocols.ids import PeerId
from atoll_bench.experts.experts_members import MEMBERS, SOURCE
from atoll_bench.experts.experts_story import (
    BEGIN,
    PHASES,
    Held,
    Rows,
    Seen,
    Told,
    folds,
    losses,
    move,
    step,
    waits_s,
)
from atoll_bench.report import Bar, Row, row

PRESET, STEPS, ROUNDS, SEED = "moe-smoke", 8, 400, 1
"""The run is longer than the story."""
VICTIM = MEMBERS - 1
POLL_S, STORY_S = 0.5, 1200.0
"""A story that takes longer has stalled."""
LEASE_S = 6.0
"""Far below the presets': the story is about what follows a dead owner's lease, not about its length."""
STALL_S = 2 * LEASE_S
"""The lease of the dead, and as long again: four nodes share this machine's cores."""
NONE = Bar("<=", 0)
SHORT = "not measured: a quick run starts no nodes"
Say = Callable[[str], None]


async def owner_rows(say: Say) -> list[Row]:
    """Play the story; what it showed. Raises LocalFault when a node ends by itself."""
    given_up = threading.Event()
    try:
        return await asyncio.to_thread(_played, given_up, say)
    finally:  # a bench that is ended takes its nodes with it: the thread ends them, and is waited for
        given_up.set()


def rows_of(told: Told, rows: Rows, experts: int) -> list[Row]:
    """The figures of a story and of the members' own books."""
    living = {member: of_member for member, of_member in rows.items() if member != VICTIM}
    waits, final = waits_s(living), folds(rows)
    late = sum(wait > STALL_S for wait in waits.values()) + (len(told.ends) < len(PHASES))
    forks = sum(len(set(digests)) > 1 for digests in final.values())
    note = f"of {len(final)} final ones; longest wait {max(waits.values(), default=0):.1f} s"
    found = [
        _row("rounds that stalled", late, f"{note}; {_curve(told, living)}"),
        _row("rounds with two digests", forks, f"{sum(map(len, final.values()))} folds compared"),
    ]
    for at, phase in enumerate(PHASES[1:], 1):
        one = move(told.ends[at - 1], told.ends[at], VICTIM, experts) if at < len(told.ends) else None
        note = "not measured: the story did not come so far" if one is None else f"{one.moved} of {experts} moved"
        found.append(_row(f"{phase}: experts without a holder", None if one is None else one.orphans, note))
        found.append(_row(f"{phase}: experts of others that moved", None if one is None else one.needless, note))
    return found


def unmeasured_rows() -> list[Row]:
    """The same rows, of a bench that played no story."""
    return [replace(each, value=None, passed=None, note=SHORT) for each in rows_of(Told((), ()), {}, 0)]


def _row(metric: str, value: int | None, note: str) -> Row:
    return row(f"an owner dies: {metric}", value, "", NONE, note=note)


def _curve(told: Told, rows: Rows) -> str:
    """Training loss of the rounds in which the story turned, of those before them, and of the last."""
    found = losses(rows)
    wanted = {number for turn in told.turns for number in (turn - 1, turn)} | {max(found, default=0)}
    shown = ", ".join(f"round {number + 1}: {found[number]:.3f}" for number in sorted(wanted & found.keys()))
    return f"training loss, nats: {shown}"


def _played(given_up: threading.Event, say: Say) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        swarm = _prepared(Path(folder))
        try:
            told = _tell(swarm, given_up, say)
        finally:
            for node in swarm.nodes.values():
                node.stop()
        assert swarm.spec.model.experts is not None
        return rows_of(told, _books(swarm), swarm.spec.model.experts.count)


def _prepared(folder: Path) -> Swarm:
    return prepare(
        folder,
        nodes=MEMBERS,
        rounds=ROUNDS,
        steps=STEPS,
        seed=SEED,
        preset_name=PRESET,
        data=SOURCE,
        holders=1,
        changes=(f"pace.lease_s={LEASE_S}",),
    )


def _tell(swarm: Swarm, given_up: threading.Event, say: Say) -> Told:
    """Start the nodes and do what each phase wants, until the story is over or takes too long."""
    for number in range(MEMBERS):
        start(swarm, number)
        swarm.nodes[number].wait_up(STORY_S)
    now, turns, ends = BEGIN, list[int](), list[Held]()
    deadline = time.monotonic() + STORY_S
    while time.monotonic() < deadline:
        _check_alive(swarm, now.phase in ("there", "back"))
        seen = _seen(swarm)
        then = step(now, seen)
        if then != now:
            ends.append(seen.held)
        if then is None:
            break
        if then != now:
            say(f"an owner is {then.phase}, round {then.since}")
            turns.append(then.since)
            if then.phase == "back":
                start(swarm, VICTIM)
            else:
                swarm.nodes[VICTIM].kill()
        now = then
        if given_up.wait(POLL_S):
            raise LocalFault("given up")
    return Told(turns, ends)


def _check_alive(swarm: Swarm, all_of_them: bool) -> None:
    for number, node in swarm.nodes.items():
        if not node.running and (all_of_them or number != VICTIM):
            raise LocalFault(f"node {number} ended: {node.last_words()}")


def _seen(swarm: Swarm) -> Seen:
    statuses = {number: node.status() for number, node in swarm.nodes.items()}
    known = {number: status for number, status in statuses.items() if status is not None}
    held = {number: frozenset(status["experts"] or ()) for number, status in known.items()}
    final, at_hand = (max((s[what] for s in known.values()), default=-1) for what in ("final", "round"))
    takes_part = any(swarm.nodes[VICTIM].peer in status["contributors"] for status in known.values())
    return Seen(at_hand, final, takes_part, held)


def _books(swarm: Swarm) -> Rows:
    """Every member's rows, as they lie on its disk."""
    found: dict[int, dict[int, dict[str, Any]]] = {}
    for number, node in swarm.nodes.items():
        books = RoundLog(Home(node.home).run(swarm.spec.id), PeerId(node.peer), time.time)
        found[number] = {at: asdict(each) for at, each in books.rows.items()}
        books.close()
    return found
