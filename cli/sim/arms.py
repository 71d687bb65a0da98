"""The reference arms of `atoll sim --baselines`: single processes that train on as many tokens as the swarm."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atoll.cli.command_table import extension
from atoll.cli.sim.progress import Progress
from atoll.cli.sim.swarm import Swarm
from atoll.protocols.errors import LocalFault

ARMS = ("unigram", "adamw", "average")
"""The dense arm is plain averaging, because it beats Nesterov in short runs (docs/calibration.md)."""
AT_ONCE = 2
POLL_S = 0.5


def arms_module() -> str:
    """The module that runs one arm. Raises ConfigError where the repository's own packages are not installed."""
    return extension("atoll.reference_arms", "reference", "the reference arms").value


def run_arms(module: str, swarm: Swarm, members: Sequence[int], progress: Progress) -> dict[str, Any]:
    """The result of each arm. `members[r]` is the size of the swarm's final set of round r. Raises LocalFault."""
    waiting = list(ARMS)
    running: dict[str, subprocess.Popen[bytes]] = {}
    found: dict[str, Any] = {}
    try:
        while len(found) < len(ARMS):
            while waiting and len(running) < AT_ONCE:
                name = waiting.pop(0)
                running[name] = _start(module, swarm, name, members)
            for name in [name for name, process in running.items() if process.poll() is not None]:
                if running.pop(name).returncode:
                    raise LocalFault(f"the reference arm {name} failed", hint=f"see {swarm.folder}/arm-{name}.log")
                found[name] = json.loads(_file(swarm, name, "json").read_text())
            shares = {name: 1.0 if name in found else _share(swarm, name) for name in ARMS}
            text = ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items())
            progress.update(min(shares.values()), text)
            time.sleep(POLL_S)
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    return found


def _start(module: str, swarm: Swarm, name: str, members: Sequence[int]) -> "subprocess.Popen[bytes]":
    """One arm in its own process, which writes a line to standard output after each round."""
    blobs = swarm.nodes[0].home / "runs" / swarm.spec.id.hex() / "blobs"
    present = ",".join(map(str, members))
    arguments = (name, swarm.run_file, blobs, present, swarm.spec.outer.rounds, _file(swarm, name, "json"))
    command = [sys.executable, "-m", module, *map(str, arguments)]
    with _file(swarm, name, "rounds").open("wb") as rounds, _file(swarm, name, "log").open("wb") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=rounds, stderr=log)


def _share(swarm: Swarm, name: str) -> float:
    rounds = _file(swarm, name, "rounds")
    done = rounds.read_bytes().count(b"\n") if rounds.exists() else 0
    return done / swarm.spec.outer.rounds


def _file(swarm: Swarm, name: str, ending: str) -> Path:
    return swarm.folder / f"arm-{name}.{ending}"
