"""F3, power loss: the disk of a node that trains, as it would be if the power went at a random instant."""

import random
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from atoll.cli.sim.homes import History, read_home
from atoll.cli.sim.nodes import SimNode
from atoll.cli.sim.oracle import judge
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
from tests.waiting import poll

SNAPSHOTS, FULL_SNAPSHOTS = 5, 200
BETWEEN_S = 2.0
"""Most time that passes between two losses."""
STARTS_EVERY = 20
"""Of so many snapshots one is opened by a whole node, which then trains on."""
RUN = ("pace.lease_s=4", "outer.stages=[[0,4]]")
"""Short rounds, and the node that starts alone goes on alone soon."""
VICTIM = 1


def power(folder: Path, seed: int, full: bool) -> Result:
    """Copies of the victim's disk at random instants, each opened by the code that a start runs."""
    rng, many = random.Random(f"power {seed}"), FULL_SNAPSHOTS if full else SNAPSHOTS
    home, copy = folder / "homes" / f"node-{VICTIM}", folder / "copy.img"
    (folder / "homes").mkdir()
    broken: list[str] = []
    newest = 0
    with (
        mounted(folder / "disk.img", home),
        town(2, seed, folder / "homes", changes=RUN) as swarm,
    ):
        wait_for_all(swarm, 1)
        for number in range(many):
            time.sleep(BETWEEN_S * rng.random())
            with stopped(swarm.nodes.values()):
                copy_of(folder / "disk.img", copy)
                other = read_home(swarm.nodes[0].home)
            starts = number % STARTS_EVERY == 0
            found = in_copy(copy, home, lambda other=other, starts=starts: opened(home, other, starts))
            broken += [f"snapshot {number}: {line}" for line in found]
            newest = max((row.round for row in other.rows if row.final), default=newest)
            if (number + 1) % 20 == 0:
                print(f"{number + 1} snapshots, {len(broken)} lines broken", flush=True)
        wait_for_all(swarm, newest)
    last = judge([read_home(path) for path in sorted((folder / "homes").glob("node-0"))])
    broken += map(str, last.violations)
    return Result("power", seed, f"{many} snapshots until final round {newest}", broken)


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
        words = node.last_words()
        node.stop()
    text = (home / "out.log").read_text(errors="replace")
    return [f"a traceback: {words}"] if "Traceback" in text else []
