"""`bench idle`: CPU of real daemons with their p2pd that have nothing to do, after a short run on loopback."""

import asyncio
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from atoll.cli.sim.progress import Progress
from atoll.cli.sim.swarm import Swarm, measure_idle, play, prepare, set_up
from atoll_bench.report import Bar, Row, row

NODES, QUICK_NODES = 4, 2
ROUNDS = 3
TIMEOUT_S = 600.0
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
            await asyncio.to_thread(_run_and_rest, swarm)
        finally:  # also when the bench is given up: the thread ends when it finds its nodes ended
            for node in swarm.nodes.values():
                node.stop()
    assert swarm.idle_daemon_cpu is not None
    note = f"mean of {count} nodes, after a run of {ROUNDS} rounds"
    return [row("idle CPU of daemon + p2pd", 100 * swarm.idle_daemon_cpu, "% of a core", IDLE_CPU, note=note)]


def _run_and_rest(swarm: Swarm) -> None:
    progress = Progress(sys.stderr)
    with progress.phase("set-up"):
        set_up(swarm, progress)
    with progress.phase("rounds"):
        play(swarm, TIMEOUT_S, progress)
    with progress.phase("rest"):
        measure_idle(swarm, progress)
