"""Nodes that are killed or frozen: F1, F15, F16 and the SIGSTOP of F8."""

import os
import random
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from atoll.cli.sim.homes import read_homes
from atoll.cli.sim.oracle import judge
from atoll.cli.sim.swarm import Swarm, start
from atoll_bench.goodput.storm import Storm, newest_final, play, town, wait_for_all
from tests.chaos.report import Result

NODES, FULL_NODES = 3, 8
KILL_EVERY_S = 5.0
SECONDS, FULL_SECONDS = 30.0, 1200.0
TIMES, FULL_TIMES = 1, 10
FROZEN_S, FULL_FROZEN_S = 10.0, 90.0
"""The longer one is beyond a lease."""


def kills(folder: Path, seed: int, full: bool) -> Result:
    """SIGKILL at random, one node every 5 s, each back at once."""
    nodes, seconds = (FULL_NODES, FULL_SECONDS) if full else (NODES, SECONDS)
    outcome = play(Storm(nodes, seconds, KILL_EVERY_S, seed), folder, print)
    seen = f"{outcome.kills} kills of {nodes} nodes, {outcome.rounds} rounds meanwhile; {outcome.verdict.line}"
    return Result("kills", seed, seen, list(map(str, outcome.verdict.violations)))


def all_die(folder: Path, seed: int, full: bool) -> Result:
    """All nodes are killed at once and come back in any order, again and again."""
    rng, times = random.Random(f"all die {seed}"), FULL_TIMES if full else TIMES
    took = []
    with town(NODES, seed, folder) as swarm:
        wait_for_all(swarm, 1)
        for _ in range(times):
            time.sleep(5.0 * rng.random())  # anywhere in a round
            before = newest_final(swarm)
            for node in swarm.nodes.values():
                node.kill()
            for number in rng.sample(list(swarm.nodes), len(swarm.nodes)):
                start(swarm, number)
            took.append(wait_for_all(swarm, before))
    return judged("all-die", seed, folder, f"{times} times all of {NODES}, back in {max(took):.0f} s at most")


def frozen(folder: Path, seed: int, full: bool) -> Result:
    """A node with its worker and its p2pd is stopped (SIGSTOP), and goes on."""
    rng, seconds = random.Random(f"frozen {seed}"), FULL_FROZEN_S if full else FROZEN_S
    with town(NODES, seed, folder) as swarm:
        wait_for_all(swarm, 1)
        victim = rng.randrange(NODES)
        before = newest_final(swarm)
        signal_all(swarm, [victim], signal.SIGSTOP)
        time.sleep(seconds)
        signal_all(swarm, [victim], signal.SIGCONT)
        meanwhile = newest_final(swarm) - before
        took_s = wait_for_all(swarm, newest_final(swarm))
    seen = f"node {victim} for {seconds:.0f} s, {meanwhile} rounds meanwhile, one chain {took_s:.0f} s later"
    return judged("frozen", seed, folder, seen)


def signal_all(swarm: Swarm, numbers: Iterable[int], number: int) -> None:
    """Send a signal to the processes of these nodes, each by its id."""
    for node in numbers:
        for process in swarm.nodes[node].processes():
            os.kill(process.pid, number)


def judged(case: str, seed: int, folder: Path, seen: str) -> Result:
    """The case's result, by the oracle's verdict over the homes in its folder."""
    verdict = judge(read_homes(folder))
    return Result(case, seed, f"{seen}; {verdict.line}", list(map(str, verdict.violations)))
