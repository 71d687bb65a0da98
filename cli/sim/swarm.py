"""The swarm of `atoll sim`: writes its run, starts its nodes, lets its story happen until all rounds are final."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from atoll.cli.runs.changes import with_changes
from atoll.cli.runs.draft import Draft, origin_of, write_run
from atoll.cli.sim.nodes import SimNode
from atoll.cli.sim.progress import Progress
from atoll.cli.sim.scenario import Seen, Story, plan
from atoll.cli.sim.verdict import Rows, Validation, newest_validation
from atoll.node.config.home import Home
from atoll.node.runs.presets import fragmented, preset
from atoll.p2p.system.key_file import load_or_create
from atoll.protocols.errors import LocalFault
from atoll.protocols.run.run_spec import RunSpec, Stage, open_run
from atoll.protocols.run.slices import ReduceSpec

POLL_S = 0.5
NEWEST_ROWS = 8
"""Rows that each look asks a node for: the validation of a round ends well before the eighth after it."""
LOADING = ("syncing", "catching up")
"""Activities of a node that runs and does not train yet."""
HELD = "the simulation waits for a node that loads"

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
    seen: Seen = field(default_factory=Seen)
    paused: set[int] = field(default_factory=set)
    """Nodes that the story has paused."""
    held_since: float | None = None
    held_round: int = 0
    """The newest round of all when the others were paused last."""
    held_s: float = 0.0
    """How long the others were paused for nodes that load."""
    newest: Validation | None = None
    """Validation of the newest round that any node has validated: its round never falls."""
    sleep: Callable[[float], None] = time.sleep
    """Between two looks at the nodes; raises what ends the simulation."""
    seconds: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)


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
    spec = open_run(write_run(home, run_file, draft, origin))
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
    pace = msgspec.structs.replace(spec.pace, min_members=nodes)
    spec = msgspec.structs.replace(spec, name=name, outer=outer, pace=pace)
    inner = msgspec.structs.replace(spec.inner, total_steps=spec.steps_before(outer.rounds))
    return msgspec.structs.replace(spec, inner=inner)


def set_up(swarm: Swarm, patience_s: float, progress: Progress) -> None:
    """Start the founders and wait until all of them answer, for each at most `patience_s`. Raises LocalFault."""
    founders = swarm.story.founders
    progress.update(0.0, f"0 of {founders} nodes are up in {swarm.folder}")
    for number in range(founders):
        start(swarm, number)
        if number == 0:
            swarm.nodes[0].wait_up(patience_s, swarm.sleep)  # the seed of the others
    for number, node in enumerate(swarm.nodes.values(), 1):
        node.wait_up(patience_s, swarm.sleep)
        progress.update(number / founders, f"{number} of {founders} nodes are up in {swarm.folder}")


def play(swarm: Swarm, patience_s: float, progress: Progress) -> None:
    """Let the story happen and wait until all rounds are final everywhere.

    Raises LocalFault when a node ends by itself, or no node gets further within `patience_s`.
    """
    last, before = swarm.spec.outer.rounds - 1, None
    while True:
        statuses: Statuses = {number: node.status() for number, node in swarm.nodes.items()}
        rows = {number: node.rounds(NEWEST_ROWS) for number, node in swarm.nodes.items()}
        _look(swarm, statuses, rows)
        _happen(swarm, progress)
        _hold(swarm, statuses, progress)
        known = [status for status in statuses.values() if status is not None]
        if known:
            _show(swarm, known, rows, progress)
        if swarm.story.is_over(swarm.seen) and all(
            s is not None and s["final"] == last for s in statuses.values()
        ):
            break
        now = [(status["round"], status["final"]) for status in known]
        if now != before:
            before, deadline = now, time.monotonic() + patience_s
        _check_alive(swarm, statuses, deadline)
        swarm.sleep(POLL_S)
    spent = [node.cpu_s() for node in swarm.nodes.values()]
    swarm.cpu_s = {kind: sum(one[kind] for one in spent) for kind in ("daemon", "worker")}


def all_rows(swarm: Swarm, patience_s: float) -> dict[int, list[dict[str, Any]]]:
    """Every row of every node. Raises LocalFault when a node gives none within `patience_s`."""
    deadline = time.monotonic() + patience_s
    rows = {number: node.rounds() for number, node in swarm.nodes.items()}
    while silent := [number for number, found in rows.items() if not found]:
        if time.monotonic() > deadline:
            raise LocalFault(f"nodes {silent} do not answer", hint="give it a longer --timeout")
        swarm.sleep(POLL_S)
        rows |= {number: swarm.nodes[number].rounds() for number in silent}
    return rows


def stop_all(nodes: Iterable[SimNode]) -> None:
    """Ask all nodes to end, then wait for each."""
    nodes = list(nodes)
    for node in nodes:
        node.terminate()
    for node in nodes:
        node.stop()


def start(swarm: Swarm, number: int) -> None:
    """Start one node; it knows every other running node as a seed, or its own cache."""
    node = swarm.nodes.setdefault(number, SimNode(number, swarm.folder, swarm.run_file))
    others = [n.seed() for n in swarm.nodes.values() if n.number != number]
    node.start([seed for seed in others if seed][:2])


def _look(swarm: Swarm, statuses: Statuses, rows: Rows) -> None:
    """Add to what was seen: how far the swarm is, and who contributed to each final round."""
    for number, status in statuses.items():
        if status is not None:
            swarm.nodes[number].peer = status["peer"]
            swarm.seen = replace(swarm.seen, reached=max(swarm.seen.reached, status["round"]))
    numbers = {node.peer: number for number, node in swarm.nodes.items()}
    final = {row["round"]: row["contributors"] for of_node in rows.values() for row in of_node if row["final"]}
    fresh = {number: {numbers.get(peer, -1) for peer in peers} for number, peers in final.items()}
    swarm.seen = replace(swarm.seen, final={**swarm.seen.final, **fresh})


def _happen(swarm: Swarm, progress: Progress) -> None:
    """Do what the story wants done now."""
    seen = swarm.seen
    for kill in swarm.story.to_kill(seen):
        swarm.sleep(kill.delay_s)
        swarm.nodes[kill.node].kill()
        swarm.paused.discard(kill.node)
        seen = replace(seen, killed={**seen.killed, kill.node: seen.reached})
        progress.note(f"node {kill.node} killed with SIGKILL at round {seen.reached}")
    for number in swarm.story.to_start(seen):
        start(swarm, number)
        seen = replace(seen, started={**seen.started, number: seen.reached})
        what = "starts again" if number in seen.killed else "joins"
        progress.note(f"node {number} {what} at round {seen.reached}")
    swarm.seen = seen


def _hold(swarm: Swarm, statuses: Statuses, progress: Progress) -> None:
    """Pause all nodes while the story must wait for one that is on its way, that one too; then let all go on.

    Those that were waited for go first, until they are in the round of the others: a node that is paused may look
    ready while its worker still loads, and short rounds end without it.
    """
    loading = [n for n in swarm.nodes if (s := statuses.get(n)) is None or s["activity"] in LOADING]
    if swarm.story.must_hold(swarm.seen, loading):
        if swarm.held_since is None:
            swarm.held_since, swarm.held_round = time.monotonic(), swarm.seen.reached
            progress.note(f"the swarm waits at round {swarm.held_round} for nodes that load")
        # A node that does not answer is asked again at the next look.
        swarm.paused |= {n for n, node in swarm.nodes.items() if n not in swarm.paused and node.pause(HELD)}
        return
    behind = [n for n in swarm.seen.started if (s := statuses.get(n)) is None or s["round"] < swarm.held_round]
    first = [n for n in swarm.paused if n in behind]
    for number in first or ([] if behind else list(swarm.paused)):
        if swarm.nodes[number].resume():
            swarm.paused.discard(number)
    if swarm.held_since is not None and not swarm.paused:
        swarm.held_s += time.monotonic() - swarm.held_since
        swarm.held_since = None


def _check_alive(swarm: Swarm, statuses: Statuses, deadline: float) -> None:
    """Raise LocalFault when a node ended by itself or time is up."""
    for number, node in swarm.nodes.items():
        expected_dead = number in swarm.seen.killed and number not in swarm.seen.started
        if not node.running and not expected_dead:
            raise LocalFault(f"node {number} ended: {node.last_words()}", hint=f"see {node.home}/out.log")
    if time.monotonic() > deadline:
        stuck = {number: status and (status["activity"], status["reason"]) for number, status in statuses.items()}
        raise LocalFault(f"the swarm gets no further: {stuck}", hint="give it a longer --timeout")


def _show(swarm: Swarm, known: list[dict[str, Any]], rows: Rows, progress: Progress) -> None:
    """The line of the rounds: of the node that is furthest, but the validation is the swarm's newest."""
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
