"""F3, power loss: the disk of a node that trains, as it would be if the power went at a random instant."""

import random
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from atoll.cli.sim.homes import History, read_home
from atoll.cli.sim.nodes import SimNode
from atoll.cli.sim.oracle import judge
from atoll.cli.sim.swarm import Swarm
from atoll.node.config.home import Home
from atoll.node.daemon.telemetry.round_log import RoundLog
from atoll.node.worker.session import Session
from atoll.p2p.blobs.store import BlobStore
from atoll.protocols import codec
from atoll.protocols.local.worker_messages import StartRequest
from atoll_bench.goodput.storm import town, wait_for_all
from tests.chaos.loop_image import in_copy, mounted
from tests.chaos.report import Result
from tests.chaos.stopped import stopped
from tests.tracebacks import tracebacks
from tests.waiting import poll

SNAPSHOTS, FULL_SNAPSHOTS = 5, 200
BETWEEN_S = 2.0
"""Most time that passes between two losses."""
STARTS_EVERY = 20
"""Of so many snapshots one is opened by a whole node, which then trains on."""
RUN = ("pace.lease_s=4", "outer.stages=[[0,4]]")
"""Short rounds, and the node that starts alone goes on alone soon."""
VICTIM = 1
HELD = 20
"""Copies that wait to be looked at: meanwhile the swarm trains, and takes the CPU of those who look."""


class Loss(NamedTuple):
    """A power loss that was not looked at yet."""

    number: int
    image: Path
    """What the victim's disk would hold."""
    other: History
    """What the other node knew at that instant."""


def power(folder: Path, seed: int, full: bool) -> Result:
    """Copies of the victim's disk at random instants, each opened by the code that a start runs."""
    rng, many = random.Random(f"power {seed}"), FULL_SNAPSHOTS if full else SNAPSHOTS
    home = folder / "homes" / f"node-{VICTIM}"
    (folder / "homes").mkdir()
    broken, waiting, newest = list[str](), list[Loss](), 0
    with mounted(folder / "disk.img", home):
        with town(2, seed, folder / "homes", changes=RUN) as swarm:
            wait_for_all(swarm, 1)
            for number in range(many):
                time.sleep(BETWEEN_S * rng.random())
                waiting.append(lost(swarm, folder, number))
                newest = max((row.round for row in waiting[-1].other.rows if row.final), default=newest)
                if len(waiting) == HELD:
                    broken += looked_at(waiting, home)
            wait_for_all(swarm, newest)
        # Without the swarm, which would train meanwhile. The victim's logs are on its disk, which is mounted here.
        broken += looked_at(waiting, home)
        broken += tracebacks(home)
    last = judge([read_home(path) for path in sorted((folder / "homes").glob("node-0"))])
    broken += map(str, last.violations)
    return Result("power", seed, f"{many} snapshots until final round {newest}", broken)


def lost(swarm: Swarm, folder: Path, number: int) -> Loss:
    """Stop all processes and copy the victim's disk."""
    image = folder / f"copy-{number}.img"
    with stopped(swarm.nodes.values()):
        copy_of(folder / "disk.img", image)
        return Loss(number, image, read_home(swarm.nodes[0].home))


def looked_at(losses: list[Loss], home: Path) -> list[str]:
    """Return what is wrong with the copies, and remove them."""
    broken = []
    print(f"{len(losses)} snapshots to look at", flush=True)
    for number, image, other in losses:
        starts = number % STARTS_EVERY == 0
        found = in_copy(image, home, lambda other=other, starts=starts: opened(home, other, starts))
        broken += [f"snapshot {number}: {line}" for line in found]
        image.unlink()
    losses.clear()
    return broken


def copy_of(image: Path, copy: Path) -> None:
    """Copy the disk."""
    subprocess.run(["cp", "--sparse=always", str(image), str(copy)], check=True, timeout=120)


def opened(home: Path, other: History, starts: bool) -> list[str]:
    """What is wrong with the disk that is mounted at `home`, beside what the other node knew at that instant."""
    found = [str(violation) for violation in judge([read_home(home), other]).violations]
    found += _started(home, other)
    if starts:
        found += _whole_start(home)
        found += [f"after a start: {violation}" for violation in judge([read_home(home), other]).violations]
    return found


def _started(home: Path, other: History) -> Sequence[str]:
    """Open all that a start opens, with its own code: the worker's state, the blobs, the log of rounds."""
    spec, folder, mine = other.spec, Home(home).run(other.spec.id), read_home(home)
    session = Session(StartRequest(codec.encode(spec), mine.peer, str(folder), "", 1, "cpu"))
    started = session.started()
    session.close()
    RoundLog(folder, mine.peer, time.time).close()
    store = BlobStore(folder / "blobs")
    damaged = [f"blob {blob.hex()[:8]} is not whole" for blob in store.blobs() if not store.is_whole(blob)]
    if mine.saved is not None and started.final != mine.saved.final:
        damaged.append(f"the worker starts at round {started.final}, saved was {mine.saved.final}")
    return damaged


def _whole_start(home: Path) -> Sequence[str]:
    """Start the whole node, alone and without a network: it answers, and a further round becomes final."""
    node = SimNode(VICTIM, home.parent, home.parent / "sim.run")
    node.start([])
    try:
        node.wait_up(300.0)
        before = (node.status() or {"final": -1})["final"]
        poll(
            "a further round is final", lambda: node.running and (node.status() or {"final": -1})["final"] > before
        )
    finally:
        node.stop()
    return tracebacks(home)
