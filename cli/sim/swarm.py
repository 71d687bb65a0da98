"""The swarm of `atoll sim`: writes its run, starts its nodes, lets its story happen until all rounds are final."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from atoll.cli.commands.new_run import Draft, origin_of, write_run
from atoll.cli.commands.run import with_changes
from atoll.cli.sim.nodes import SimNode
from atoll.cli.sim.progress import Progress
from atoll.cli.sim.scenario import Story, plan
from atoll.cli.sim.verdict import Validation, newest_validation
from atoll.node.config.home import Home
from atoll.node.runs.presets import fragmented, preset
from atoll.p2p.system.key_file import load_or_create
from atoll.protocols.errors import LocalFault
from atoll.protocols.run.run_spec import RunSpec, Stage, open_run
from atoll.protocols.run.slices import ReduceSpec

POLL_S = 0.5
SETTLE_S, IDLE_S = 4.0, 15.0
"""After the last round the nodes still exchange its finality, for SETTLE_S; IDLE_S of rest is measured then."""
LEASE_S = 6.0
"""A killed member is waited for at most so long; loopback peers renew every two seconds."""
NEWEST_ROWS = 8
"""Rows that each look asks a node for: the validation of a round ends well before the eighth after it."""

Statuses = dict[int, dict[str, Any] | None]
"""Each node's status, None where it does not answer."""


@dataclass
class Swarm:
    """The nodes of one simulation and what was seen of them."""

    spec: RunSpec
    folder: Path
    run_file: Path
    story: Story
    nodes: dict[int, SimNode] = field(default_factory=dict)
    returned_at: dict[int, int] = field(default_factory=dict)
    """Round at which a killed or late node was started."""
    newest: Validation | None = None
    """Validation of the newest round that any node has validated: its round never falls."""
    seconds: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)
    idle_daemon_cpu: float | None = None
    """Share of a core that a daemon with its p2pd used at rest, mean over the nodes."""


def prepare(
    folder: Path,
    *,
    nodes: int,
    rounds: int | None,
    steps: int | None,
    seed: int,
    preset_name: str,
    data: str,
    holders: int = 0,
    fragments: int = 1,
    changes: tuple[str, ...] = (),
    from_hf: Path | None = None,
    upcycle: str | None = None,
    kill: bool = False,
    late_join: bool = False,
    reduce_above: int | None = None,
) -> Swarm:
    """The signed run of node 0, and the story. Raises ConfigError."""
    home = Home(folder / "node-0")
    home.make()
    owner = load_or_create(home.identity)

    def adjust(spec: RunSpec) -> RunSpec:
        spec = _with_numbers(_with_holders(spec, holders), nodes, rounds, steps, f"sim-{seed}")
        spec = fragmented(spec, fragments)
        if reduce_above is not None:
            spec = msgspec.structs.replace(spec, reduce=ReduceSpec(above=reduce_above, k=2 * spec.compress.k))
        return with_changes(spec, changes)

    run_file = folder / "sim.run"
    draft = Draft(preset(preset_name, owner.peer_id, seed, data), adjust, data.removeprefix("file:"))
    # A rehearsal of what the nodes do: of weights that do not fit it warns.
    origin = origin_of(from_hf, upcycle, without_fit=from_hf is not None)
    spec = open_run(write_run(home, run_file, draft, owner, origin))
    story = plan(nodes, spec.outer.rounds, seed, kill=kill, late_join=late_join)
    return Swarm(spec, folder, run_file, story)


def _with_holders(spec: RunSpec, holders: int) -> RunSpec:
    """The run with `holders` members that train each expert; rounds of such a run are not reduced."""
    outer = msgspec.structs.replace(spec.outer, holders=holders)
    return msgspec.structs.replace(spec, outer=outer, reduce=None if holders else spec.reduce)


def _with_numbers(spec: RunSpec, nodes: int, rounds: int | None, steps: int | None, name: str) -> RunSpec:
    """The run with the numbers that the user gave."""
    outer = msgspec.structs.replace(spec.outer, rounds=rounds or spec.outer.rounds)
    if steps is not None:
        outer = msgspec.structs.replace(outer, stages=(Stage(0, steps),))
    pace = msgspec.structs.replace(spec.pace, min_members=nodes, lease_s=LEASE_S)
    spec = msgspec.structs.replace(spec, name=name, outer=outer, pace=pace)
    inner = msgspec.structs.replace(spec.inner, total_steps=spec.steps_before(outer.rounds))
    return msgspec.structs.replace(spec, inner=inner)


def set_up(swarm: Swarm, progress: Progress) -> None:
    """Start the founders and wait until all of them answer. Raises LocalFault."""
    founders = swarm.story.founders
    progress.update(0.0, f"0 of {founders} nodes are up in {swarm.folder}")
    for number in range(founders):
        start(swarm, number)
        if number == 0:
            swarm.nodes[0].wait_up()  # the seed of the others
    for number, node in enumerate(swarm.nodes.values(), 1):
        node.wait_up()
        progress.update(number / founders, f"{number} of {founders} nodes are up in {swarm.folder}")


def play(swarm: Swarm, timeout_s: float, progress: Progress) -> None:
    """Let the story happen and wait until all rounds are final everywhere. Raises LocalFault."""
    deadline = time.monotonic() + timeout_s
    while True:
        statuses: Statuses = {number: node.status() for number, node in swarm.nodes.items()}
        for number, status in statuses.items():
            if status is not None:
                swarm.nodes[number].peer = status["peer"]
        known = [status for status in statuses.values() if status is not None]
        reached = max((status["round"] for status in known), default=0)
        all_happened = _happen(swarm, reached, progress)
        if known:
            _show(swarm, known, progress)
        done = all(s is not None and s["final"] == swarm.spec.outer.rounds - 1 for s in statuses.values())
        if done and all_happened:
            return
        _check_alive(swarm, statuses, deadline)
        time.sleep(POLL_S)


def measure_idle(swarm: Swarm, progress: Progress) -> None:
    """Measure the CPU of the daemons (with p2pd) while nothing is trained."""
    _rest(SETTLE_S, 0.0, progress)
    before = {number: node.cpu_s() for number, node in swarm.nodes.items()}
    _rest(IDLE_S, SETTLE_S, progress)
    after = {number: node.cpu_s() for number, node in swarm.nodes.items()}
    spent = [after[number]["daemon"] - before[number]["daemon"] for number in swarm.nodes]
    swarm.idle_daemon_cpu = sum(spent) / len(spent) / IDLE_S
    for kind in ("daemon", "worker"):
        swarm.cpu_s[kind] = sum(one[kind] for one in after.values())
    progress.update(1.0, f"idle CPU of a daemon with its p2pd: {100 * swarm.idle_daemon_cpu:.2f} % of a core")


def _rest(seconds: float, rested_s: float, progress: Progress) -> None:
    until = time.monotonic() + seconds
    while (left_s := until - time.monotonic()) > 0:
        progress.update((rested_s + seconds - left_s) / (SETTLE_S + IDLE_S), "the nodes rest, for their idle CPU")
        time.sleep(min(POLL_S, left_s))


def start(swarm: Swarm, number: int) -> None:
    """Start one node; it knows every other running node as a seed, or its own cache."""
    node = swarm.nodes.setdefault(number, SimNode(number, swarm.folder, swarm.run_file))
    others = [n.seed() for n in swarm.nodes.values() if n.number != number and n.status() is not None]
    node.start(others[:2])


def _happen(swarm: Swarm, reached: int, progress: Progress) -> bool:
    """Do what the story wants done at round `reached`; True once all of it has happened."""
    for kill in swarm.story.kills:
        victim = swarm.nodes[kill.node]
        if not victim.kills and reached >= kill.at_round:
            time.sleep(kill.delay_s)
            victim.kill()
            progress.note(f"node {kill.node} killed with SIGKILL at round {reached}")
    due = [
        (kill.node, kill.back_round, "starts again") for kill in swarm.story.kills if swarm.nodes[kill.node].kills
    ]
    due += [(join.node, join.at_round, "joins") for join in swarm.story.joins]
    for number, at_round, what in due:
        if number not in swarm.returned_at and reached >= at_round:
            start(swarm, number)
            swarm.returned_at[number] = reached
            progress.note(f"node {number} {what} at round {reached}")
    return len(swarm.returned_at) == len(swarm.story.kills) + len(swarm.story.joins)


def _check_alive(swarm: Swarm, statuses: Statuses, deadline: float) -> None:
    """Raise LocalFault when a node ended by itself or time is up."""
    for number, node in swarm.nodes.items():
        expected_dead = node.kills > 0 and number not in swarm.returned_at
        if not node.running and not expected_dead:
            raise LocalFault(f"node {number} ended: {node.last_words()}", hint=f"see {node.home}/out.log")
    if time.monotonic() > deadline:
        stuck = {number: status and (status["activity"], status["reason"]) for number, status in statuses.items()}
        raise LocalFault(f"the swarm did not finish in time: {stuck}", hint="give it a longer --timeout")


def _show(swarm: Swarm, known: list[dict[str, Any]], progress: Progress) -> None:
    """The line of the rounds: of the node that is furthest, but the validation is the swarm's newest."""
    rows = {number: node.rounds(NEWEST_ROWS) for number, node in swarm.nodes.items()}
    found = newest_validation(rows)
    # A node that lags or came back shows older rounds: their values must not replace a newer one.
    if found is not None and (swarm.newest is None or found.round > swarm.newest.round):
        swarm.newest = found
    furthest = max(known, key=lambda status: (status["final"], status["round"]))
    rounds = swarm.spec.outer.rounds
    val = f"{swarm.newest.bpb:.3f} bits/byte (round {swarm.newest.round})" if swarm.newest else "–"
    finished = sum(status["final"] == rounds - 1 for status in known)
    nodes = f"{finished} of {len(known)} nodes finished" if finished else f"{len(known)} nodes"
    text = f"round {furthest['round']} of {rounds}, final {furthest['final']}, last val {val}, {nodes}"
    progress.update((furthest["final"] + 1) / rounds, text)
