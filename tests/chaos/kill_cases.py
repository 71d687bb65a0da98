"""Nodes that are killed: F1, F16."""

from pathlib import Path

from atoll_bench.goodput.storm import Storm, play
from tests.chaos.report import Result

NODES, FULL_NODES = 3, 8
KILL_EVERY_S = 5.0
SECONDS, FULL_SECONDS = 30.0, 1200.0


def kills(folder: Path, seed: int, full: bool) -> Result:
    """SIGKILL at random, one node every 5 s, each back at once."""
    nodes, seconds = (FULL_NODES, FULL_SECONDS) if full else (NODES, SECONDS)
    outcome = play(Storm(nodes, seconds, KILL_EVERY_S, seed), folder, print)
    seen = f"{outcome.kills} kills of {nodes} nodes, {outcome.rounds} rounds meanwhile; {outcome.verdict.line}"
    return Result("kills", seed, seen, list(map(str, outcome.verdict.violations)))
