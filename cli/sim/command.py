"""`atoll sim`: a swarm of real processes on loopback, with kills and late joins, judged at the end."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import msgspec

from atoll.cli.commands.new_run import UPCYCLE_FORM, Draft, origin_of, write_run
from atoll.cli.commands.run import FRAGMENTS_HELP, with_changes
from atoll.cli.sim.nodes import SimNode
from atoll.cli.sim.report import as_json, members_of_rounds, print_report
from atoll.cli.sim.scenario import Story, plan
from atoll.node.config.home import Home
from atoll.node.runs.fragments import fragmented
from atoll.node.runs.presets import NAMES, preset
from atoll.p2p.system.atomic_files import write_whole
from atoll.p2p.system.key_file import load_or_create
from atoll.protocols.errors import LocalFault
from atoll.protocols.run.run_spec import RunSpec, Stage, open_run
from atoll.protocols.run.slices import ReduceSpec

POLL_S = 0.5
SETTLE_S, IDLE_S = 4.0, 15.0
"""After the last round nodes still tell each other that it is final; then their rest is measured."""
LEASE_S = 6.0
"""A killed member is waited for at most so long; loopback peers renew every two seconds."""
ARMS = ("adamw", "average", "unigram")
"""Reference arms. Of the dense ones plain averaging: in short runs it beats Nesterov (docs/calibration.md)."""


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
    seconds: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)
    idle_daemon_cpu: float | None = None


@click.command("sim")
@click.option(
    "-n", "--nodes", default=4, show_default=True, type=click.IntRange(1, 16), help="Nodes from the start."
)
@click.option(
    "--rounds", default=None, type=click.IntRange(2, 10_000), help="Outer rounds; default: the preset's."
)
@click.option(
    "--steps",
    default=None,
    type=click.IntRange(1, 1000),
    help="Inner steps of every round; default: the preset's.",
)
@click.option("--seed", default=1, show_default=True, help="Decides data order, victims and times.")
@click.option("--preset", "preset_name", default="tiny", show_default=True, type=click.Choice(NAMES))
@click.option(
    "--holders", default=0, show_default=True, help="Nodes that train each expert of a mixture; 0: all nodes."
)
@click.option("--fragments", default=1, type=click.IntRange(1), metavar="P", help=FRAGMENTS_HELP)
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="As of `run new`; the last word.")
@click.option("--data", default="builtin:shakespeare", show_default=True, help="Data source of the run.")
@click.option(
    "--from-hf",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Weights and tokenizer of a Hugging Face folder.",
)
@click.option("--upcycle", metavar=UPCYCLE_FORM, help="Make experts of its feed-forward.")
@click.option("--kill", is_flag=True, help="SIGKILL one node in the first half; it comes back.")
@click.option("--late-join", is_flag=True, help="One more node joins half way.")
@click.option(
    "--reduce-above",
    default=None,
    type=click.IntRange(1, 16),
    help="Rounds with more contributors than this are reduced; default: the preset's.",
)
@click.option("--baselines", is_flag=True, help="Also train the reference arms at equal tokens.")
@click.option("--dir", "folder", default=None, type=click.Path(path_type=Path), help="Keep homes and logs here.")
@click.option("--json", "json_file", default=None, type=click.Path(path_type=Path), help="Write the report here.")
@click.option("--timeout", "timeout_s", default=900.0, show_default=True, help="Give up after so many seconds.")
def sim(folder: Path | None, json_file: Path | None, timeout_s: float, **options: Any) -> None:
    """Start a swarm of real nodes on loopback, watch it train, and check its promises.

    Exit status 1 when a promise is broken.
    """
    with tempfile.TemporaryDirectory(prefix="atoll-sim-") as temporary:
        report = simulate(folder or Path(temporary), timeout_s, click.echo, **options)
        if json_file is not None:
            write_whole(json_file, json.dumps(report, indent=1).encode())
        print_report(report, click.echo)
        if not all(check["ok"] for check in report["checks"]):
            sys.exit(1)


def simulate(folder: Path, timeout_s: float, say: Callable[[str], None], **options: Any) -> dict[str, Any]:
    """Run one story to its end; the report as docs/control.md describes it. Raises LocalFault."""
    baselines = options.pop("baselines")
    swarm = prepare(folder, **options)
    began = time.monotonic()
    try:
        play(swarm, timeout_s, say)
        swarm.seconds = time.monotonic() - began
        measure_idle(swarm)
        rows = {number: node.rounds() for number, node in swarm.nodes.items()}
    finally:
        for node in swarm.nodes.values():
            node.stop()
    arms = run_arms(swarm, members_of_rounds(rows, swarm.spec.outer.rounds), say) if baselines else {}
    return as_json(swarm, rows, arms)


def prepare(
    folder: Path,
    *,
    nodes: int,
    rounds: int | None,
    steps: int | None,
    seed: int,
    preset_name: str,
    holders: int,
    fragments: int,
    changes: tuple[str, ...],
    data: str,
    from_hf: Path | None,
    upcycle: str | None,
    kill: bool,
    late_join: bool,
    reduce_above: int | None = None,
) -> Swarm:
    """The signed run of node 0, and the story."""
    home = Home(folder / "node-0")
    home.make()
    owner = load_or_create(home.identity)
    spec = preset(preset_name, owner.peer_id, seed, data)

    def adjust(spec: RunSpec) -> RunSpec:
        told = fragmented(_told(_shared(spec, holders), nodes, rounds, steps, f"sim-{seed}"), fragments)
        if reduce_above is not None:
            told = msgspec.structs.replace(told, reduce=ReduceSpec(above=reduce_above, k=2 * told.compress.k))
        return with_changes(told, changes)

    run_file = folder / "sim.run"
    data_file = data.removeprefix("file:")
    # A rehearsal of what the nodes do: of weights that do not fit it warns.
    origin = origin_of(from_hf, upcycle, without_fit=from_hf is not None)
    written = write_run(home, run_file, Draft(spec, adjust, data_file), owner, origin)
    spec = open_run(written)
    story = plan(nodes, spec.outer.rounds, seed, kill=kill, late_join=late_join)
    return Swarm(spec, folder, run_file, story)


def _shared(spec: RunSpec, holders: int) -> RunSpec:
    """The run with so many members that train each expert; rounds of such a run are not reduced."""
    outer = msgspec.structs.replace(spec.outer, holders=holders)
    return msgspec.structs.replace(spec, outer=outer, reduce=None if holders else spec.reduce)


def _told(spec: RunSpec, nodes: int, rounds: int | None, steps: int | None, name: str) -> RunSpec:
    """The run with the numbers that the user gave."""
    outer = msgspec.structs.replace(spec.outer, rounds=rounds or spec.outer.rounds)
    if steps is not None:
        outer = msgspec.structs.replace(outer, stages=(Stage(0, steps),))
    pace = msgspec.structs.replace(spec.pace, min_members=nodes, lease_s=LEASE_S)
    spec = msgspec.structs.replace(spec, name=name, outer=outer, pace=pace)
    inner = msgspec.structs.replace(spec.inner, total_steps=spec.steps_before(outer.rounds))
    return msgspec.structs.replace(spec, inner=inner)


def play(swarm: Swarm, timeout_s: float, say: Callable[[str], None]) -> None:
    """Start everybody, let the story happen, wait until all rounds are final everywhere."""
    for number in range(swarm.story.founders):
        start(swarm, number)
        if number == 0:
            swarm.nodes[0].wait_up()
    for node in swarm.nodes.values():
        node.wait_up()
    say(f"{swarm.story.founders} nodes are up in {swarm.folder}")
    deadline = time.monotonic() + timeout_s
    pending = list(events(swarm, say))
    told = -1
    while True:
        statuses = {number: node.status() for number, node in swarm.nodes.items()}
        for number, status in statuses.items():
            if status is not None:
                swarm.nodes[number].peer = status["peer"]
        known = [status for status in statuses.values() if status is not None]
        reached = max((status["round"] for status in known), default=0)
        pending = [event for event in pending if not event(reached)]
        if reached > told and known:
            told = reached
            say(line(swarm, known))
        done = all(s is not None and s["final"] == swarm.spec.outer.rounds - 1 for s in statuses.values())
        if done and not pending:
            return
        check_alive(swarm, statuses, deadline)
        time.sleep(POLL_S)


def start(swarm: Swarm, number: int) -> None:
    """Start one node; it knows every other running node as a seed, or its own cache."""
    node = swarm.nodes.setdefault(number, SimNode(number, swarm.folder, swarm.run_file))
    others = [n.seed() for n in swarm.nodes.values() if n.number != number and n.status() is not None]
    node.start(others[:2])


def events(swarm: Swarm, say: Callable[[str], None]) -> list[Callable[[int], bool]]:
    """What the story wants done, each as a function of the round reached: True once it has happened."""
    todo: list[Callable[[int], bool]] = []
    for one in swarm.story.kills:

        def kill(reached: int, one: Any = one) -> bool:
            if reached < one.at_round:
                return False
            time.sleep(one.delay_s)
            swarm.nodes[one.node].kill()
            say(f"node {one.node} killed with SIGKILL at round {reached}")
            return True

        def back(reached: int, one: Any = one) -> bool:
            if swarm.nodes[one.node].running or reached < one.back_round:
                return False
            start(swarm, one.node)
            swarm.returned_at[one.node] = reached
            say(f"node {one.node} started again at round {reached}")
            return True

        todo += [kill, back]
    for join in swarm.story.joins:

        def come(reached: int, join: Any = join) -> bool:
            if reached < join.at_round:
                return False
            start(swarm, join.node)
            swarm.returned_at[join.node] = reached
            say(f"node {join.node} joins at round {reached}")
            return True

        todo.append(come)
    return todo


def check_alive(swarm: Swarm, statuses: dict[int, dict[str, Any] | None], deadline: float) -> None:
    """Raise LocalFault when a node ended by itself or time is up."""
    for number, node in swarm.nodes.items():
        expected_dead = node.kills > 0 and number not in swarm.returned_at
        if not node.running and not expected_dead:
            raise LocalFault(f"node {number} ended: {node.last_words()}", hint=f"see {node.home}/out.log")
    if time.monotonic() > deadline:
        stuck = {number: status and (status["activity"], status["reason"]) for number, status in statuses.items()}
        raise LocalFault(f"the swarm did not finish in time: {stuck}", hint="give it a longer --timeout")


def measure_idle(swarm: Swarm) -> None:
    """CPU of the daemons (with p2pd) while nothing is trained, as a share of one core per node."""
    time.sleep(SETTLE_S)
    before = {number: node.cpu_s() for number, node in swarm.nodes.items()}
    time.sleep(IDLE_S)
    after = {number: node.cpu_s() for number, node in swarm.nodes.items()}
    spent = [after[number]["daemon"] - before[number]["daemon"] for number in swarm.nodes]
    swarm.idle_daemon_cpu = sum(spent) / len(spent) / IDLE_S
    for kind in ("daemon", "worker"):
        swarm.cpu_s[kind] = sum(one[kind] for one in after.values())


def run_arms(swarm: Swarm, present: Sequence[int], say: Callable[[str], None]) -> dict[str, Any]:
    """The reference arms, two at a time, at the same rounds, each with as many members as the swarm's had."""
    say("training the reference arms at equal tokens: " + ", ".join(ARMS))
    found: dict[str, Any] = {}
    waiting: list[str] = list(ARMS)
    running: dict[str, subprocess.Popen[bytes]] = {}
    while waiting or running:
        while waiting and len(running) < 2:
            name = waiting.pop(0)
            running[name] = start_arm(swarm, name, present)
        for name, process in list(running.items()):
            if process.poll() is not None:
                del running[name]
                if process.returncode:
                    raise LocalFault(f"the reference arm {name} failed", hint=f"see {swarm.folder}/arm-{name}.log")
                found[name] = json.loads((swarm.folder / f"arm-{name}.json").read_text())
        time.sleep(POLL_S)
    return found


def start_arm(swarm: Swarm, name: str, present: Sequence[int]) -> "subprocess.Popen[bytes]":
    """One arm in its own process."""
    out = swarm.folder / f"arm-{name}.json"
    members, rounds = ",".join(map(str, present)), str(swarm.spec.outer.rounds)
    blobs = str(swarm.nodes[0].home / "runs" / swarm.spec.id.hex() / "blobs")
    command = [
        sys.executable,
        "-m",
        "atoll_bench.reference_arms.reference",
        name,
        str(swarm.run_file),
        blobs,
        members,
        rounds,
    ]
    command.append(str(out))
    with (swarm.folder / f"arm-{name}.log").open("wb") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def line(swarm: Swarm, known: list[dict[str, Any]]) -> str:
    """One line of progress."""
    best = max(known, key=lambda status: (status["final"], status["round"]))
    loss = "–" if best["val_bpb"] is None else f"{best['val_bpb']:.3f}"
    return (
        f"round {best['round']:>3}/{swarm.spec.outer.rounds} final {best['final']:>3}  last val {loss} bits/byte "
        f"{len(best['contributors'])} contributors  digest {best['digest'][:12] or '–'}  {len(known)} nodes"
    )
