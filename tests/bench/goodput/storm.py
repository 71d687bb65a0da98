"""A swarm of real nodes of which one is killed now and then and started again at once; what it trained meanwhile.

The same time is measured in each swarm, from a moment when all train. Only SIGKILL: nobody says good-bye.
"""

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from atoll.cli.sim.homes import History, read_homes
from atoll.cli.sim.oracle import Verdict, judge, last_rows
from atoll.cli.sim.progress import Progress
from atoll.cli.sim.swarm import Swarm, prepare, set_up, start, stop_all
from atoll.protocols.errors import LocalFault
from atoll.protocols.ledger.records import Contribution

ROUNDS = 100_000
"""No run ends before its storm does."""
PATIENCE_S = 900.0
"""Without any step forward of what is waited for."""
WARM_ROUNDS = 3
LOOK_S = 0.2


class Storm(NamedTuple):
    """What happens to a swarm."""

    nodes: int
    seconds: float
    every_s: float
    """Between two kills; 0: none."""
    seed: int
    preset: str = "tiny"


class Outcome(NamedTuple):
    """What came of a storm."""

    storm: Storm
    kills: int
    rounds: int
    """Rounds that began in the time that was measured; all of them became final."""
    tokens: int
    """Tokens of all contributions in their final sets."""
    seconds: float
    recovered_s: float
    """From the end of the storm until a round that began after it was final on all nodes."""
    verdict: Verdict

    @property
    def tokens_per_s(self) -> float:
        """Tokens that got into the model, a second."""
        return self.tokens / self.seconds


def play(storm: Storm, folder: Path, say: Callable[[str], None]) -> Outcome:
    """Let it happen, in homes below `folder`, and judge them. Raises LocalFault."""
    with town(storm.nodes, storm.seed, folder, storm.preset) as swarm:
        first = _wait_until_warm(swarm)
        began = time.monotonic()
        kills = _strike(swarm, storm, say)
        seconds = time.monotonic() - began
        last = newest_round(swarm)
        recovered_s = wait_for_all(swarm, last)
    histories = read_homes(folder)
    rounds = range(first + 1, last + 1)
    tokens = tokens_of(histories, rounds)
    return Outcome(storm, kills, len(rounds), tokens, seconds, recovered_s, judge(histories))


@contextmanager
def town(
    nodes: int, seed: int, folder: Path, preset: str = "tiny", changes: Sequence[str] = ()
) -> Iterator[Swarm]:
    """A swarm with the preset's pace that is up; it is stopped in good order at the end. Raises LocalFault."""
    swarm = prepare(
        folder,
        nodes=nodes,
        rounds=ROUNDS,
        steps=None,
        seed=seed,
        preset_name=preset,
        data="synthetic:markov",
        changes=tuple(changes),
    )
    try:
        progress = Progress(sys.stderr)
        with progress.phase("set-up"):
            set_up(swarm, PATIENCE_S, progress)
        yield swarm
    finally:
        stop_all(swarm.nodes.values())


def wait_for_all(swarm: Swarm, number: int) -> float:
    """Seconds until each node has a final round after `number`. Raises LocalFault, with who lags behind."""
    began, before = time.monotonic(), None
    deadline = began + PATIENCE_S
    while True:
        finals = finals_of(swarm)
        if min(finals.values()) > number:
            return time.monotonic() - began
        if finals != before:
            before, deadline = finals, time.monotonic() + PATIENCE_S
        if time.monotonic() > deadline:
            raise LocalFault(f"no node got further than {finals} in {PATIENCE_S:.0f} s", hint="see their logs")
        dead = [node for node in swarm.nodes.values() if not node.running]
        if dead:
            raise LocalFault(f"node {dead[0].number} ended by itself: {dead[0].last_words()}")
        time.sleep(LOOK_S)


def finals_of(swarm: Swarm) -> dict[int, int]:
    """Newest final round by node; −1 before the first, and while a node does not answer."""
    statuses = {number: node.status() for number, node in swarm.nodes.items()}
    return {number: status["final"] if status else -1 for number, status in statuses.items()}


def newest_final(swarm: Swarm) -> int:
    """The newest final round of any node."""
    return max(finals_of(swarm).values())


def newest_round(swarm: Swarm) -> int:
    """The newest round that any node trains."""
    statuses = [node.status() for node in swarm.nodes.values()]
    return max(int(status["round"]) for status in statuses if status)


def tokens_of(histories: Sequence[History], rounds: range) -> int:
    """Tokens that the final sets of these rounds contain, by what the ledgers say of each contribution."""
    authors = {
        number: set(row.contributors)
        for history in histories
        for number, row in last_rows(history.rows).items()
        if row.final and number in rounds
    }
    said: dict[tuple[str, int], int] = {}
    for history in histories:
        for entry in history.entries:
            if isinstance(entry.body, Contribution):
                said.setdefault((entry.author, entry.body.round), entry.body.tokens)
    return sum(said.get((author, number), 0) for number, found in authors.items() for author in found)


def _wait_until_warm(swarm: Swarm) -> int:
    """The newest round once all nodes train together."""
    wait_for_all(swarm, WARM_ROUNDS)
    peers = {node.peer for node in swarm.nodes.values()}
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        rows = [row for row in swarm.nodes[0].rounds(8) if row["final"]]
        if rows and set(rows[-1]["contributors"]) >= peers:
            return newest_round(swarm)
        time.sleep(LOOK_S)
    raise LocalFault("not all nodes train together", hint="see their logs")


def _strike(swarm: Swarm, storm: Storm, say: Callable[[str], None]) -> int:
    """Kill and start again until the time is over; the number of kills."""
    rng, kills = random.Random(f"storm {storm.seed}"), 0
    end = time.monotonic() + storm.seconds
    due = time.monotonic() + storm.every_s * rng.random() if storm.every_s else end
    while time.monotonic() < end:
        time.sleep(max(0.0, min(due, end) - time.monotonic()))
        if time.monotonic() >= end:
            break
        victim = rng.randrange(storm.nodes)
        # Kills fall anywhere in a round and in a start: a victim that still loads is killed again.
        swarm.nodes[victim].kill()
        start(swarm, victim)
        kills += 1
        due += storm.every_s
        if kills % 20 == 0:
            say(f"{kills} kills, newest final round {newest_final(swarm)}")
    return kills
