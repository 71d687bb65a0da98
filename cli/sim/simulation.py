"""A simulated swarm from its set-up to its report."""

import importlib
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from atoll.cli.command_table import extension
from atoll.cli.sim.progress import Progress
from atoll.cli.sim.report import as_json
from atoll.cli.sim.swarm import all_rows, play, prepare, set_up, stop_all
from atoll.cli.sim.verdict import PromiseCheck

BROKEN_SHOWN = 20
"""Most violations of the oracle that a report names."""


def _judged(folder: Path) -> PromiseCheck:
    """What the oracle says of the homes below a folder (docs/chaos.md). No node may run there."""
    from atoll.cli.sim.homes import read_homes
    from atoll.cli.sim.oracle import judge

    verdict = judge(read_homes(folder))
    broken = "".join(f"; {violation}" for violation in verdict.violations[:BROKEN_SHOWN])
    return PromiseCheck("the oracle finds nothing broken", not verdict.violations, verdict.line + broken)


class Termination:
    """SIGTERM ends a simulation in order, between two looks at its nodes.

    An exception that its handler raised anywhere would be lost in a callback of the interpreter's own.
    """

    def __init__(self) -> None:
        self._came = False
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True

    def sleep(self, seconds: float) -> None:
        """Sleep. Raises SystemExit with 143 after SIGTERM."""
        time.sleep(seconds)
        if self._came:
            sys.exit(128 + signal.SIGTERM)


def simulate(folder: Path, patience_s: float, *, baselines: bool, **options: Any) -> dict[str, Any]:
    """Run one story to its end; the report as docs/simulation.md describes it. Raises LocalFault, ConfigError."""
    reference = extension("atoll.reference_arms", "reference", "the reference arms") if baselines else None
    progress = Progress(sys.stderr)
    swarm = prepare(folder, **options)
    swarm.sleep = Termination().sleep
    began = time.monotonic()
    try:
        with progress.phase("set-up"):
            set_up(swarm, patience_s, progress)
        with progress.phase("rounds"):
            play(swarm, patience_s, progress)
        swarm.seconds = time.monotonic() - began
        rows = all_rows(swarm, patience_s)
    finally:
        stop_all(swarm.nodes.values())
    report = as_json(swarm, rows)
    with progress.phase("oracle"):
        report["checks"].append(asdict(_judged(folder)))
    if reference is not None:
        with progress.phase("reference arms"):
            importlib.import_module(reference).compare(swarm, rows, report, progress)
    return report
