"""The story of `atoll sim` with nodes that are slow to load: it waits for what must happen."""

import io
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.cli.sim import swarm as sim
from atoll.cli.sim.progress import Progress
from atoll.cli.sim.report import promises
from atoll.cli.sim.verdict import by_round
from atoll.protocols.errors import LocalFault

ROUNDS = 20


class Rounds:
    """What the nodes of one swarm have in common: rounds that end at every look, with whoever trains."""

    def __init__(self, loads: int, folds: int) -> None:
        """`loads`: looks until a node that the story started can be paused. `folds`: looks until it trains."""
        self.loads, self.folds = loads, folds
        self.nodes: dict[int, FakeNode] = {}
        self.final: list[list[str]] = []
        """Contributors of each final round."""

    def go_on(self) -> None:
        training = [node.peer for node in self.nodes.values() if node.running and node.activity() == "training"]
        if training and len(self.final) < ROUNDS:
            self.final.append(training)


class FakeNode:
    """What `SimNode` offers to the story. Its looks pass the time; node 0's end the rounds."""

    def __init__(self, number: int, folder: Path, run_file: Path, rounds: Rounds) -> None:
        self.number, self.home, self._rounds = number, folder, rounds
        self.peer = f"peer{number}"
        self.running = False
        self.deaf = 0
        """Requests to pause or resume that go unanswered."""
        self._paused = False
        self._left = 0
        self._behind = 0
        """Looks without a pause until it is in the round of the others."""
        rounds.nodes[number] = self

    def start(self, seeds: list[str]) -> None:
        began = self._rounds.final != []
        self.running, self._paused = True, False
        self._left, self._behind = (self._rounds.loads, self._rounds.folds) if began else (0, 0)

    def wait_up(self, patience_s: float, sleep: Callable[[float], None]) -> None:
        assert self.running

    def seed(self) -> str:
        return self.peer

    def activity(self) -> str:
        if self._left > 0:
            return "catching up"
        if len(self._rounds.final) == ROUNDS:
            return "finished"
        if self._paused:
            return "paused"
        return "folding" if self._behind > 0 else "training"

    def status(self) -> dict[str, Any] | None:
        if not self.running:
            return None
        self._left -= 1
        self._behind -= self.activity() == "folding"
        if self._left > self._rounds.loads // 2:
            return None  # the process starts: its socket does not answer yet
        if self.number == min(n for n, node in self._rounds.nodes.items() if node.running):
            self._rounds.go_on()
        newest = len(self._rounds.final)
        words = {"peer": self.peer, "addresses": ["/a"], "activity": self.activity(), "reason": ""}
        return {**words, "round": 0 if self._behind > 0 else newest, "final": newest - 1}

    def rounds(self, last: int = 10_000) -> list[dict[str, Any]]:
        rows = [
            {
                "round": number, "peer": self.peer, "final": True, "contributors": peers, "val_bpb": None,
                "digest": "aa", "own_digest": "aa", "payload_bytes": 1000, "blob_bytes_up": 1000,
                "blob_payload_up": 1000,
            }
            for number, peers in enumerate(self._rounds.final)
        ]  # fmt: skip
        return rows[-last:]

    def pause(self, reason: str) -> bool:
        return self._told(True)

    def resume(self) -> bool:
        return self._told(False)

    def _told(self, paused: bool) -> bool:
        if not self.running or self._left > self._rounds.loads // 2:
            return False
        self.deaf -= 1
        if self.deaf >= 0:
            return False
        self._paused = paused
        return True

    def kill(self) -> None:
        self.running = False

    def cpu_s(self) -> dict[str, float]:
        return {"daemon": 1.0, "worker": 1.0}

    def last_words(self) -> str:
        return "it printed nothing"


@pytest.fixture
def play(tmp_path, monkeypatch) -> Callable[..., sim.Swarm]:
    """Plays the story of a seed with nodes that load for so many looks."""

    def one(seed: int, loads: int, patience_s: float = 60.0, deaf: int = 0, folds: int = 0) -> sim.Swarm:
        looks = itertools.count()
        clock = SimpleNamespace(monotonic=lambda: next(looks) / 100, sleep=lambda _: None)
        rounds = Rounds(loads, folds)

        def made(number: int, folder: Path, run_file: Path) -> FakeNode:
            node = rounds.nodes.get(number) or FakeNode(number, folder, run_file, rounds)
            node.deaf = deaf
            return node

        monkeypatch.setattr(sim, "SimNode", made)
        monkeypatch.setattr(sim, "POLL_S", 0.0)
        monkeypatch.setattr(sim, "time", clock)
        swarm = sim.prepare(
            tmp_path, nodes=3, rounds=ROUNDS, steps=1, seed=seed, preset_name="tiny", data="synthetic:markov",
            kill=True, late_join=True,
        )  # fmt: skip
        swarm.sleep = clock.sleep
        progress = Progress(io.StringIO())
        sim.set_up(swarm, patience_s, progress)
        sim.play(swarm, patience_s, progress)
        return swarm

    return one


def came_back(swarm: sim.Swarm) -> list[bool]:
    """Whether each killed or late node contributed to a final round after it was started."""
    rows = {number: node.rounds() for number, node in swarm.nodes.items()}
    checks = promises(swarm, rows, by_round(rows))
    return [check.ok for check in checks if "contributes from" in check.name]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("loads", [1, 3, 300])
def test_killed_and_late_nodes_contribute_however_long_they_load(play, seed, loads):
    swarm = play(seed, loads)
    assert came_back(swarm) == [True, True]
    assert swarm.paused == set()
    assert (swarm.held_s > 0) == (loads == 300), "a quick machine is never held"


def test_a_node_that_is_slow_to_answer_is_paused_and_resumed_later(play):
    swarm = play(1, 300, deaf=3)
    assert came_back(swarm) == [True, True]
    assert swarm.paused == set()


@pytest.mark.parametrize("seed", range(3))
def test_who_comes_back_is_in_the_round_of_the_others_before_they_go_on(play, seed):
    """A paused node may look ready while its worker loads: it folds the rounds of the others after the pause."""
    assert came_back(play(seed, 300, folds=30)) == [True, True]


def test_a_swarm_that_gets_no_further_is_given_up(play):
    with pytest.raises(LocalFault, match="the swarm gets no further"):
        play(1, 10**9)
