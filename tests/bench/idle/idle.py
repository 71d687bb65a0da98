"""`bench idle`: CPU of real daemons with their p2pd that have nothing to do, after a short run on loopback."""

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from atoll.cli.sim.progress import Progress
from atoll.cli.sim.swarm import Swarm, play, prepare, set_up, stop_all
from atoll_bench.report import Bar, Row, row

NODES, QUICK_NODES = 4, 2
ROUNDS = 3
PATIENCE_S = 600.0
SETTLE_S, IDLE_S = 4.0, 15.0
"""After the last round the nodes still exchange its finality, for SETTLE_S; IDLE_S of rest is measured then."""
IDLE_CPU = Bar("<=", 2.0)


async def measure(quick: bool, say: Callable[[str], None], *, nodes: int | None = None) -> list[Row]:
    """One row. Raises LocalFault."""
    count = nodes or (QUICK_NODES if quick else NODES)
    with tempfile.TemporaryDirectory(prefix="atoll-idle-") as folder:
        swarm = prepare(
            Path(folder),
            nodes=count,
            rounds=ROUNDS,
            steps=2,
            seed=1,
            preset_name="tiny",
            data="synthetic:markov",
        )
        try:
            share = await asyncio.to_thread(_run_and_rest, swarm)
        finally:  # also when the bench is given up: the thread ends when it finds its nodes ended
            stop_all(swarm.nodes.values())
    note = f"mean of {count} nodes, after a run of {ROUNDS} rounds"
    return [row("idle CPU of daemon + p2pd", 100 * share, "% of a core", IDLE_CPU, note=note)]


def _run_and_rest(swarm: Swarm) -> float:
    progress = Progress(sys.stderr)
    with progress.phase("set-up"):
        set_up(swarm, PATIENCE_S, progress)
    with progress.phase("rounds"):
        play(swarm, PATIENCE_S, progress)
    with progress.phase("rest"):
        progress.update(0.0, "the nodes rest, for their idle CPU")
        return _idle_share(swarm)


def _idle_share(swarm: Swarm) -> float:
    """Share of a core that a daemon with its p2pd uses at rest, mean over the nodes."""
    time.sleep(SETTLE_S)
    before = {number: node.cpu_s() for number, node in swarm.nodes.items()}
    began = time.monotonic()
    time.sleep(IDLE_S)
    after = {number: node.cpu_s() for number, node in swarm.nodes.items()}
    gone_s = time.monotonic() - began
    spent = [after[number]["daemon"] - before[number]["daemon"] for number in swarm.nodes]
    return sum(spent) / len(spent) / gone_s
