"""Sparse gossip with one merge at the end ("A Single Merging Suffices", arXiv 2507.06542), beside rarer rounds.

    python -m atoll_bench.convergence.gossip [--rounds 100] [--seeds 3]

Eight members train from their own weights. After every 15 steps a random graph has a mean number of neighbours for
each member. Neighbours are mixed by Metropolis weights, which do not change the mean of all members. At last all
are merged into their mean. A neighbour gets a float32 model. Where all members are neighbours, an exchange is a
round of plain averaging. There is no such rule: docs/decisions/0031-no-gossip-with-one-merge.md.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.node.learning.data.dataset import open_dataset
from atoll.node.learning.data.shakespeare import default_cache
from atoll.node.learning.outer.fixed import to_fixed
from atoll_bench.convergence.arm_lines import print_lines
from atoll_bench.convergence.arms import MEMBERS, arm_of, spec_of
from atoll_bench.convergence.crew import CrewRounds
from atoll_bench.reference_arms.baselines import Task

NEIGHBOURS = 0.2
"""Mean neighbours of a member after each H steps, as published."""
STEPS = 15
ALL = MEMBERS - 1.0
Schedule = Callable[[int, int], float]
"""Mean neighbours of a member after a round, of so many rounds."""

SCHEDULES: dict[str, Schedule] = {
    "no exchange": lambda number, rounds: 0.0,
    "0.2 neighbours": lambda number, rounds: NEIGHBOURS,
    # The same budget in a fifth of the run.
    "1 neighbour, last fifth": lambda number, rounds: 5 * NEIGHBOURS * (5 * number >= 4 * rounds),
    "1 neighbour, first fifth": lambda number, rounds: 5 * NEIGHBOURS * (5 * number < rounds),
    # As many bytes where each sends its model once, and where an all-reduce sends 2·7/8 of one.
    "all, every 5th round": lambda number, rounds: ALL * (number % 5 == 4),
    "all, every 8th round": lambda number, rounds: ALL * (number % 8 == 7),
    "all, every round": lambda number, rounds: ALL,
}


def drawn(neighbours: float, members: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """A random graph `[M, M]`, symmetric and without loops; `neighbours` of a member on average."""
    upper = np.triu(rng.random((members, members)) < neighbours / (members - 1), 1)
    return upper | upper.T


def mixing(graph_MM: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Metropolis weights `[M, M]` of a graph: symmetric, and each row has the sum 1."""
    degree = graph_MM.sum(axis=1)
    share = np.where(graph_MM, 1.0 / (1 + np.maximum(degree[:, None], degree[None])), 0.0)
    return share + np.diag(1 - share.sum(axis=1))


class Gossip(CrewRounds):
    """Members that train on from their own weights, and are mixed with some neighbours after each round."""

    def __init__(self, task: Task, folder: Path, schedule: Schedule) -> None:
        super().__init__(task, folder, exact=True)
        self._schedule = schedule
        self._rng = np.random.default_rng(task.spec.seed)
        self.models = 0.0
        """Models that a member sent to neighbours, on average; one in a round in which all are."""

    def round(self, number: int) -> Sequence[float]:
        """All members' steps of a round, then one exchange; the losses of all steps."""
        task = self._task
        losses = self.together(number, 0, task.spec.steps(number))
        graph_MM = drawn(self._schedule(number, task.rounds), task.members, self._rng)
        self.models += 1.0 if graph_MM.sum() == task.members * ALL else float(graph_MM.sum()) / task.members
        if graph_MM.any():
            before = self.weights()
            for slot, row_M in enumerate(mixing(graph_MM)):
                mixed_C4096 = torch.tensordot(torch.from_numpy(row_M), before, dims=1)
                self.crew.write(slot, mixed_C4096.float())
        return losses

    def weights(self) -> Tensor:
        """Each member's weights, float64 `[M, C, 4096]`."""
        return torch.stack([self.crew.read(slot).double() for slot in range(self._task.members)])

    def bpb(self, weights_C4096: Tensor) -> float:
        """Validation loss, bits per byte."""
        return self._learners[0].evaluate(to_fixed(weights_C4096), self._val_WT1, self._val_bytes).val_bpb


def run(name: str, seed: int, rounds: int, size: str) -> dict[str, object]:
    """Train an arm; what it gave."""
    spec = spec_of(arm_of("average-float32", size, total=STEPS * rounds, seed=seed, steps=STEPS))
    data = open_dataset(spec.data, spec.model.context, "", default_cache())
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        arm = Gossip(Task(spec, data, MEMBERS, spec.outer.rounds), Path(folder), SCHEDULES[name])
        for number in range(spec.outer.rounds):
            arm.round(number)
        weights_MC4096 = arm.weights()
        return {
            "val_bpb": arm.bpb(weights_MC4096.mean(dim=0)),
            "first_alone_bpb": arm.bpb(weights_MC4096[0]),
            "sent_models": arm.models + 1,  # the merge
            "model_bytes": 4 * spec.model.parameters,
        }


if __name__ == "__main__":
    print_lines(run, SCHEDULES, __doc__, f"{STEPS} steps")
