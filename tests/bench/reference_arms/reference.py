"""What a swarm of `atoll sim --baselines` is judged against: single processes that train on as many tokens.

`make swarm` runs all arms at once, each with one thread: `compare` adds their curves and checks to the report.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from atoll.cli.sim.progress import Progress
from atoll.cli.sim.swarm import Swarm
from atoll.cli.sim.verdict import PromiseCheck, Rows
from atoll.p2p.system.child_processes import die_with_parent
from atoll.protocols.errors import LocalFault

ARMS = ("adamw", "diloco", "average", "unigram")
DENSE = ("diloco", "average")
"""Dense arms with the swarm's own rounds: DiLoCo's Nesterov, tuned, and plain averaging. The better one counts."""
ADAMW_LIMIT, DENSE_LIMIT = 1.10, 1.01
"""The swarm's loss over an arm's, at most."""
POLL_S = 0.5


def compare(swarm: Swarm, rows: Rows, report: dict[str, Any], progress: Progress) -> None:
    """Train the arms, and add their curves and the checks against them to the report. Raises LocalFault."""
    arms = run_arms(swarm, members_of_rounds(rows, swarm.spec.outer.rounds), progress)
    report["baseline"] = arms
    report["checks"] += [asdict(check) for check in judge(report["val_bpb"], report["tokens"], arms)]


def judge(val_bpb: float | None, tokens: int, arms: Mapping[str, Any]) -> list[PromiseCheck]:
    """Against the arms when they had as many tokens as the swarm's final sets."""
    if val_bpb is None:
        return [PromiseCheck("learns", False, "no node validated any round")]
    dense = {name: bpb_at(arms[name]["points"], tokens) for name in DENSE}
    return [
        learned(val_bpb, arms["unigram"]["unigram_bpb"]),
        against({"adamw": bpb_at(arms["adamw"]["points"], tokens)}, val_bpb, ADAMW_LIMIT),
        against(dense, val_bpb, DENSE_LIMIT),
    ]


def learned(val_bpb: float, unigram_bpb: float) -> PromiseCheck:
    """Validation bits per byte far below the byte-unigram entropy of the text."""
    ok = val_bpb < 0.8 * unigram_bpb
    return PromiseCheck("learns", ok, f"{val_bpb:.3f} bits per byte, unigram {unigram_bpb:.3f}")


def against(bpbs: Mapping[str, float], val_bpb: float, limit: float) -> PromiseCheck:
    """The swarm's validation loss is no more than `limit` × that of the best of some arms at equal tokens."""
    best = min(bpbs, key=lambda name: bpbs[name])
    ratio = val_bpb / bpbs[best]
    seen = f"{val_bpb:.3f} / {bpbs[best]:.3f} = {ratio:.3f} (≤ {limit})"
    worse = ", ".join(f"{name} is worse: {bpb:.3f}" for name, bpb in bpbs.items() if name != best)
    return PromiseCheck(f"against {' and '.join(bpbs)}", ratio <= limit, f"{best}: {seen}{worse and '; ' + worse}")


def members_of_rounds(rows: Rows, total: int) -> list[int]:
    """Contributors of each round's final set; a killed node is missing in some, a late one in the first."""
    sizes = {
        row["round"]: len(row["contributors"]) for of_node in rows.values() for row in of_node if row["final"]
    }
    return [max(1, sizes.get(number, 0)) for number in range(total)]


def bpb_at(points: Sequence[Mapping[str, Any]], tokens: int) -> float:
    """Validation loss of an arm after `tokens` tokens, on a line between two of its points; at most its last."""
    for before, after in pairwise(points):
        if tokens < after["tokens"]:
            share = max(0.0, (tokens - before["tokens"]) / (after["tokens"] - before["tokens"]))
            return float(before["val_bpb"] + share * (after["val_bpb"] - before["val_bpb"]))
    return float(points[-1]["val_bpb"])


def run_arms(swarm: Swarm, members: Sequence[int], progress: Progress) -> dict[str, Any]:
    """The result of each arm. `members[r]` is the size of the swarm's final set of round r. Raises LocalFault."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    found: dict[str, Any] = {}
    try:
        for name in ARMS:
            running[name] = _start(swarm, name, members)
        while len(found) < len(ARMS):
            for name in [name for name, process in running.items() if process.poll() is not None]:
                if running.pop(name).returncode:
                    raise LocalFault(f"the reference arm {name} failed", hint=f"see {swarm.folder}/arm-{name}.log")
                found[name] = json.loads(_file(swarm, name, "json").read_text())
            shares = {name: 1.0 if name in found else _share(swarm, name) for name in ARMS}
            text = ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items())
            progress.update(min(shares.values()), text)
            swarm.sleep(POLL_S)
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    return found


def _start(swarm: Swarm, name: str, members: Sequence[int]) -> "subprocess.Popen[bytes]":
    """One arm in its own process, which writes a line to standard output after each round."""
    blobs = swarm.nodes[0].home / "runs" / swarm.spec.id.hex() / "blobs"
    present = ",".join(map(str, members))
    arguments = (name, swarm.run_file, blobs, present, swarm.spec.outer.rounds, _file(swarm, name, "json"))
    command = [sys.executable, "-m", "atoll_bench.reference_arms.arm", *map(str, arguments)]
    with _file(swarm, name, "rounds").open("wb") as rounds, _file(swarm, name, "log").open("wb") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=rounds, stderr=log, preexec_fn=die_with_parent(os.getpid())
        )


def _share(swarm: Swarm, name: str) -> float:
    rounds = _file(swarm, name, "rounds")
    done = rounds.read_bytes().count(b"\n") if rounds.exists() else 0
    return done / swarm.spec.outer.rounds


def _file(swarm: Swarm, name: str, ending: str) -> Path:
    return swarm.folder / f"arm-{name}.{ending}"
