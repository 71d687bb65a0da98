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
SETTLE_S, IDLE_S = 4.0, 30.0
"""After the last round the nodes still exchange its finality, for SETTLE_S; IDLE_S of rest is measured then."""
IDLE_CPU = Bar("<=", 1.0)


async def measure(quick: bool, say: Callable[[str], None], *, nodes: int | None = None) -> list[Row]:
    """The sum with its bar, and both parts. Raises LocalFault."""
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
            spent = await asyncio.to_thread(_run_and_rest, swarm)
        finally:  # also when the bench is given up: the thread ends when it finds its nodes ended
            stop_all(swarm.nodes.values())
    note = f"mean of {count} nodes, after a run of {ROUNDS} rounds"
    unit = "% of a core"
    return [
        row("idle CPU of daemon + p2pd", sum(spent), unit, IDLE_CPU, note=note),
        row("idle CPU of the daemon alone", spent[0], unit),
        row("idle CPU of p2pd alone", spent[1], unit, note="Go; what our requests to it cost is in it"),
    ]


def _run_and_rest(swarm: Swarm) -> tuple[float, float]:
    progress = Progress(sys.stderr)
    with progress.phase("set-up"):
        set_up(swarm, PATIENCE_S, progress)
    with progress.phase("rounds"):
        play(swarm, PATIENCE_S, progress)
    with progress.phase("rest"):
        progress.update(0.0, "the nodes rest, for their idle CPU")
        return _idle_percent(swarm)


def _idle_percent(swarm: Swarm) -> tuple[float, float]:
    """Percent of a core that a daemon and its p2pd use at rest, means over the nodes."""
    time.sleep(SETTLE_S)
    before, began = _cpu_s(swarm), time.monotonic()
    time.sleep(IDLE_S)
    after, ended = _cpu_s(swarm), time.monotonic()
    scale = 100 / (ended - began) / len(swarm.nodes)
    return scale * (after[0] - before[0]), scale * (after[1] - before[1])


def _cpu_s(swarm: Swarm) -> tuple[float, float]:
    """CPU seconds of all daemons, and of all p2pds, so far."""
    daemons = p2pds = 0.0
    for node in swarm.nodes.values():
        own = sum(sum(each.cpu_times()[:2]) for each in node.processes() if each.name().startswith("p2pd"))
        daemons += node.cpu_s()["daemon"] - own
        p2pds += own
    return daemons, p2pds
