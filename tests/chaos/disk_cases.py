"""F1, F2: killed before and after every durable step. F4: a disk that fails at one, or a read. F5: wrong clocks.

The places are found by following a node, so a new one needs no entry anywhere (`probe/sitecustomize.py`).
"""

import json
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from atoll.cli.sim.homes import read_homes
from atoll.cli.sim.oracle import judge
from atoll.cli.sim.swarm import Swarm, start
from atoll.p2p.system.atomic_files import write_whole
from atoll.protocols.errors import LocalFault
from atoll_bench.goodput.storm import newest_final, town, wait_for_all
from tests.chaos.kill_cases import judged
from tests.chaos.report import Result
from tests.chaos.stopped import stopped
from tests.waiting import HANGS_S, poll

ROOT = Path(__file__).resolve().parents[2]
RUN = ("pace.lease_s=4", "outer.stages=[[0,4]]")
VICTIM = 1
POINTS = 3
FOLLOWED_ROUNDS = 8
"""A snapshot is taken every five rounds."""
NTH_MOST = 3
NOTHING: Mapping[str, str] = {}
HOURS_6 = 21_600.0
JUMPS_S = (HOURS_6, -HOURS_6, 600.0, 0.0)
"""What the clock of one node is ahead by, one after the other; another node's is behind by as much."""


class Step(NamedTuple):
    """A durable step of one process of a node."""

    role: str
    """`daemon` or `worker`."""
    name: str
    """`fsync node/checkpoint/generations.py:Unfinished.finish`, …"""


def steps(folder: Path, seed: int, full: bool) -> Result:
    """Kill a node right before, or right after, a durable step; it comes back, and nothing is lost."""
    rng = random.Random(f"steps {seed}")
    with town(2, seed, folder / "homes", changes=RUN) as swarm:
        known = followed(swarm, folder)
        points = [(step, when) for step in known for when in ("before", "after")]
        chosen = points if full else rng.sample(points, POINTS)
        broken, missed = [], 0
        for step, when in chosen:
            strike = {"when": when, "nth": rng.randint(1, NTH_MOST), "how": "kill"}
            if not struck(swarm, folder, step, strike):
                missed += 1
                continue
            start(swarm, VICTIM)
            wait_for_all(swarm, newest_final(swarm))
            broken += [f"{when} {step.name} ({step.role}): {line}" for line in violations(swarm, folder)]
    seen = f"{len(chosen) - missed} of {len(chosen)} points met, of {len(known)} steps before and after"
    return Result("steps", seed, seen, broken)


def eio(folder: Path, seed: int, full: bool) -> Result:
    """A durable step fails once with EIO; the node says so and goes on, or ends in good order and comes back."""
    return failed("eio", folder, seed, full, {})


def eio_reads(folder: Path, seed: int, full: bool) -> Result:
    """The same for a read of one of the node's files."""
    return failed("eio-reads", folder, seed, full, {"CHAOS_READS": str((folder / "homes").resolve())})


def failed(case: str, folder: Path, seed: int, full: bool, probe: Mapping[str, str]) -> Result:
    """Let steps, or reads, fail once each; what came of it. `probe`: variables that say what is followed."""
    rng = random.Random(f"{case} {seed}")
    with town(2, seed, folder / "homes", changes=RUN) as swarm:
        known = followed(swarm, folder, probe)
        broken, met, ended = [], 0, list[str]()
        for step in known if full else rng.sample(known, POINTS):
            # Most reads are of a start, once in a life.
            strike = {"when": "before", "nth": 1 if probe else rng.randint(1, NTH_MOST), "how": "eio"}
            if not struck(swarm, folder, step, strike, probe, ends=False):
                continue
            met += 1
            ended += filter(None, [went_on(swarm)])
            broken += [f"{step.name} ({step.role}): {line}" for line in violations(swarm, folder)]
    seen = f"{met} met of {len(known)}; {len(ended)} times the node ended with one line"
    return Result(case, seed, seen, broken)


def clock(folder: Path, seed: int, full: bool) -> Result:
    """The wall clocks of two of three nodes are 6 h ahead and 6 h behind."""
    with town(3, seed, folder / "homes", changes=RUN) as swarm:
        wait_for_all(swarm, 1)
        for number, ahead_s in ((1, HOURS_6), (2, -HOURS_6)):
            swarm.nodes[number].kill()
            with environment({"CHAOS_CLOCK_S": str(ahead_s)}):
                start(swarm, number)
        wait_for_all(swarm, newest_final(swarm) + 5)
        peers = {node.peer for node in swarm.nodes.values()}
        poll("all three contribute", lambda: peers in contributors(swarm))
        wait_for_all(swarm, newest_final(swarm))
    return judged("clock", seed, folder / "homes", "two clocks 12 h apart, all contribute")


def clock_jumps(folder: Path, seed: int, full: bool) -> Result:
    """The wall clocks of two of three nodes are set forth and back, by up to 12 h, while they run."""
    clocks = {1: folder / "clock-ahead", 2: folder / "clock-behind"}
    with town(3, seed, folder / "homes", changes=RUN) as swarm:
        wait_for_all(swarm, 1)
        for number, path in clocks.items():
            swarm.nodes[number].kill()
            with environment({"CHAOS_CLOCK": str(path)}):
                start(swarm, number)
        for ahead_s in JUMPS_S:
            wait_for_all(swarm, newest_final(swarm) + 2)
            write_whole(clocks[1], str(ahead_s).encode())
            write_whole(clocks[2], str(-ahead_s).encode())
        wait_for_all(swarm, newest_final(swarm) + 2)
        peers = {node.peer for node in swarm.nodes.values()}
        poll("all three contribute", lambda: peers in contributors(swarm))
        wait_for_all(swarm, newest_final(swarm))
    return judged("clock-jumps", seed, folder / "homes", f"{len(JUMPS_S)} jumps of two clocks, all contribute")


def contributors(swarm: Swarm) -> list[set[str]]:
    """Of the newest final rounds of node 0."""
    return [set(row["contributors"]) for row in swarm.nodes[0].rounds(4) if row["final"]]


def followed(swarm: Swarm, folder: Path, probe: Mapping[str, str] = NOTHING) -> list[Step]:
    """Every durable step that the victim takes from its start on, snapshots included; with `probe`: its reads."""
    wait_for_all(swarm, 1)
    swarm.nodes[VICTIM].kill()
    with environment({"CHAOS_FOLDER": str(folder), **probe}):
        start(swarm, VICTIM)
    wait_for_all(swarm, newest_final(swarm) + FOLLOWED_ROUNDS)
    kind = "reads" if probe else "steps"
    names = {role: (folder / f"{kind}-{role}").read_text().splitlines() for role in ("daemon", "worker")}
    return [Step(role, name) for role, found in names.items() for name in dict.fromkeys(found)]


def struck(
    swarm: Swarm,
    folder: Path,
    step: Step,
    strike: Mapping[str, object],
    probe: Mapping[str, str] = NOTHING,
    *,
    ends: bool = True,
) -> bool:
    """Start the victim again with a strike; whether it met the step within some rounds."""
    marker, node = folder / "struck", swarm.nodes[VICTIM]
    marker.unlink(missing_ok=True)
    node.kill()
    words = json.dumps({"role": step.role, "step": step.name, **strike})
    with environment({"CHAOS_FOLDER": str(folder), "CHAOS_STRIKE": words, **probe}):
        start(swarm, VICTIM)
    last = newest_final(swarm) + 2 * FOLLOWED_ROUNDS
    poll(f"{step.name}", lambda: marker.exists() or not node.running or newest_final(swarm) > last, HANGS_S)
    if marker.exists() and ends:
        poll("it is dead", lambda: not node.running, HANGS_S)
    return marker.exists()


def went_on(swarm: Swarm) -> str:
    """Wait until all go on; what the victim said last where it had to be started again, empty where it had not."""
    words = ""
    try:
        wait_for_all(swarm, newest_final(swarm))
    except LocalFault:
        node = swarm.nodes[VICTIM]
        if node.running:
            raise
        words = node.last_words()
        start(swarm, VICTIM)
        wait_for_all(swarm, newest_final(swarm))
    return words


def violations(swarm: Swarm, folder: Path) -> list[str]:
    """What the oracle says now, with all nodes stopped for the look."""
    with stopped(swarm.nodes.values()):
        return [str(violation) for violation in judge(read_homes(folder / "homes")).violations]


@contextmanager
def environment(more: Mapping[str, str]) -> Iterator[None]:
    """Nodes that are started in the block have the probe, and these variables."""
    given = {"PYTHONPATH": str(Path(__file__).with_name("probe")), "CHAOS_ROOT": str(ROOT), **more}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
