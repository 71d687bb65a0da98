"""F1, F2: killed before and after every durable step.

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
from atoll_bench.goodput.storm import newest_final, town, wait_for_all
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


def followed(swarm: Swarm, folder: Path) -> list[Step]:
    """Every durable step that the victim takes from its start on, snapshots included."""
    wait_for_all(swarm, 1)
    swarm.nodes[VICTIM].kill()
    with environment({"CHAOS_FOLDER": str(folder)}):
        start(swarm, VICTIM)
    wait_for_all(swarm, newest_final(swarm) + FOLLOWED_ROUNDS)
    names = {role: (folder / f"steps-{role}").read_text().splitlines() for role in ("daemon", "worker")}
    return [Step(role, name) for role, found in names.items() for name in dict.fromkeys(found)]


def struck(swarm: Swarm, folder: Path, step: Step, strike: Mapping[str, object]) -> bool:
    """Start the victim again with a strike; whether it met the step within some rounds."""
    marker, node = folder / "struck", swarm.nodes[VICTIM]
    marker.unlink(missing_ok=True)
    node.kill()
    words = json.dumps({"role": step.role, "step": step.name, **strike})
    with environment({"CHAOS_FOLDER": str(folder), "CHAOS_STRIKE": words}):
        start(swarm, VICTIM)
    last = newest_final(swarm) + 2 * FOLLOWED_ROUNDS
    poll(f"{step.name}", lambda: marker.exists() or not node.running or newest_final(swarm) > last, HANGS_S)
    if marker.exists():
        poll("it is dead", lambda: not node.running, HANGS_S)
    return marker.exists()


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
