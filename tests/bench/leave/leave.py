"""`bench leave`: real nodes leave for good, by `stop` and by SIGKILL, and the others go on; the presets' pace."""

import asyncio
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from atoll.cli.sim.homes import read_homes
from atoll.cli.sim.nodes import SimNode
from atoll.cli.sim.oracle import judge
from atoll.cli.sim.progress import Progress
from atoll.cli.sim.swarm import Swarm, prepare, set_up, stop_all
from atoll.protocols.errors import LocalFault
from atoll.protocols.ledger.ballots import quorum
from atoll_bench.leave.departures import Cost, Departure, Way, chains, row_of
from atoll_bench.leave.stored import PlayedChain, read_chain, write_chain
from atoll_bench.report import Bar, Row, row

WAYS: Final[tuple[Way, ...]] = ("stop", "kill")
NODES, QUICK_NODES = 4, 2
ROUNDS = 100_000
"""No story ends before its run does."""
PATIENCE_S = 600.0
HAND_OVER_S = 300.0
"""More than a node stays for those that go on (docs/leaving.md)."""
WARM_ROUNDS, USUAL_ROUNDS = 3, 5
LOOK_S = 0.05
VIOLATIONS = Bar("<=", 0)


async def measure(
    quick: bool,
    say: Callable[[str], None],
    *,
    nodes: int | None = None,
    store: str = "",
    minutes: float = math.inf,
) -> list[Row]:
    """A row for each way and departure, and what the oracle says of all.

    `store`: a folder for chains that were played, which are not played again. `minutes`: no chain begins later;
    the departures of those left have rows without a value. Raises LocalFault, DecodeError, DiskFault.
    """
    most = nodes or (QUICK_NODES if quick else NODES)
    folder = Path(store) if store else None
    until = time.monotonic() + minutes * 60
    costs: dict[tuple[Way, Departure], Cost] = {}
    broken = 0
    for chain in chains(most):
        for way in WAYS:
            played = await _played(chain, way, say, folder=folder, may_play=time.monotonic() < until)
            costs |= {(way, cost.departure): cost for cost in (played.costs if played else ())}
            broken += len(played.violations) if played else 0
    rows = [
        row_of(departure, way, costs.get((way, departure)))
        for way in WAYS
        for chain in chains(most)
        for departure in chain
    ]
    return [*rows, row("violations that the oracle found", broken, "", VIOLATIONS)]


async def _played(
    chain: Sequence[Departure], way: Way, say: Callable[[str], None], *, folder: Path | None, may_play: bool
) -> PlayedChain | None:
    """A chain from the store, or played now and stored; None where it shall not be played now."""
    found = read_chain(folder, chain, way) if folder else None
    if found is not None or not may_play:
        return found
    found = await _play(chain, way, say)
    if folder:
        write_chain(folder, chain, way, found)
    return found


async def _play(chain: Sequence[Departure], way: Way, say: Callable[[str], None]) -> PlayedChain:
    with tempfile.TemporaryDirectory(prefix="atoll-leave-") as folder:
        swarm = prepare(
            Path(folder),
            nodes=chain[0].members,
            rounds=ROUNDS,
            steps=None,
            seed=1,
            preset_name="tiny",
            data="synthetic:markov",
        )
        try:
            costs = await asyncio.to_thread(_depart, swarm, chain, way, say)
        finally:  # also when the bench is given up: the thread ends when it finds its nodes ended
            stop_all(swarm.nodes.values())
        violations = tuple(map(str, judge(read_homes(Path(folder))).violations))
        for violation in violations:
            say(violation)
        return PlayedChain(costs=tuple(costs), violations=violations)


def _depart(swarm: Swarm, chain: Sequence[Departure], way: Way, say: Callable[[str], None]) -> list[Cost]:
    progress = Progress(sys.stderr)
    with progress.phase("set-up"):
        set_up(swarm, PATIENCE_S, progress)
    found = []
    for departure in chain:
        cost = _leave(swarm, departure, way)
        say(
            f"{way}: {departure.gone} of {departure.members}: round {cost.round_s:.2f} s, took {cost.took_s:.2f} s"
        )
        found.append(cost)
    return found


def _leave(swarm: Swarm, departure: Departure, way: Way) -> Cost:
    members = [node for node in swarm.nodes.values() if node.running]
    assert len(members) == departure.members
    # Node 0, which was everybody's first seed and owns the run, leaves first.
    leaving, staying = members[: departure.gone], members[departure.gone :]
    watch = staying[0]
    round_s = _usual_round_s(watch, members)
    for node in leaving:
        _end(node, way)
    for node in leaving:
        node.stop(HAND_OVER_S)
    before, ended = _status(watch), time.monotonic()
    # The round that was open when they ended: the others must decide it without them.
    _until_final(watch, before["round"])
    took_s, after = time.monotonic() - ended, _status(watch)
    lease_s = swarm.spec.pace.lease_s if way == "kill" and len(staying) < quorum(departure.members) else 0.0
    return Cost(departure, way, round_s, took_s - lease_s, after["round"] - before["round"])


def _end(node: SimNode, way: Way) -> None:
    if way == "stop":
        node.terminate()
    else:
        node.kill()


def _usual_round_s(watch: SimNode, members: Sequence[SimNode]) -> float:
    """Median seconds of a round in which all members are."""
    peers = {node.peer for node in members}
    _until(watch, lambda now: _contributors(watch) >= peers)
    first = _status(watch)["final"] + WARM_ROUNDS
    times = []
    for number in range(first, first + USUAL_ROUNDS + 1):
        _until_final(watch, number)
        times.append(time.monotonic())
    return statistics.median(after - before for before, after in pairwise(times))


def _contributors(watch: SimNode) -> set[str]:
    final = [row for row in watch.rounds(8) if row["final"]]
    return set(final[-1]["contributors"]) if final else set()


def _status(node: SimNode) -> dict[str, int]:
    status = node.status()
    if status is None:
        raise LocalFault(f"node {node.number} does not answer: {node.last_words()}")
    return status


def _until_final(node: SimNode, number: int) -> None:
    _until(node, lambda now: now["final"] >= number)


def _until(node: SimNode, is_so: Callable[[dict[str, int]], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so(_status(node)):
        if time.monotonic() > deadline:
            raise LocalFault(f"node {node.number} got no further in {PATIENCE_S:.0f} s", hint="see its log")
        time.sleep(LOOK_S)
