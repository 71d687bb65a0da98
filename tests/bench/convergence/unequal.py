"""What work is worth that was trained from an old base: FedBuff (arXiv 2106.06639), FedFix (arXiv 2206.10189).

    python -m atoll_bench.convergence.unequal [--rounds 100] [--seeds 3]

Eight members, four of which take a quarter of the steps in the same time. All arms take the same steps at the same
times. They differ in when a member's work counts and in its weight, a whole number that follows from the number of
its steps and from the age of its base in outer steps, or from the sets before: the product's (`pace.stale`). In
other arms all members are equally fast, and now and then late for their round. Work is float32. The outer step is
the product's; that of a buffer divides by the number of works, as published. Results: docs/staleness.md.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from atoll.node.daemon.audits.stale_weights import WINDOWS, by_rarity, share_of_age
from atoll.node.learning.data.dataset import open_dataset
from atoll.node.learning.data.shakespeare import default_cache
from atoll.node.learning.outer.fixed import plus, to_fixed, to_float
from atoll.node.learning.outer.fold import RoundSet, round_set
from atoll.node.worker.round_trainer import WEIGHT_UNIT
from atoll.protocols.ids import PeerId, digest
from atoll.protocols.ledger.probation import scaled
from atoll.protocols.local.worker_messages import Member
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.experts import ALL
from atoll_bench.convergence.arm_lines import print_lines
from atoll_bench.convergence.arms import MEMBERS, arm_of, spec_of
from atoll_bench.convergence.crew import Crew, CrewRounds
from atoll_bench.convergence.trial import _Rounds
from atoll_bench.module_values import read_module
from atoll_bench.reference_arms.baselines import Task

TICKS = 4
"""Parts of a round. A slow member takes one step while a fast one takes STEPS // TICKS."""
STEPS = 16
FAST = MEMBERS // 2
MOST = 8
"""`pace.stale.most` of `run new --method fedfix`."""
LATE, BETA = 0.25, 0.95
"""How often a member is late, and the factor on work that returns to it."""
Weigh = Callable[[int, int], int]
"""Weight of work of some steps whose base is some outer steps old."""


def even(steps: int, age: int) -> int:
    return WEIGHT_UNIT


def by_steps(steps: int, age: int) -> int:
    """The product's: tokens over those of a whole round."""
    return max(1, WEIGHT_UNIT * steps // STEPS)


def by_age(steps: int, age: int) -> int:
    """FedBuff's 1/√(1 + s)."""
    return scaled(WEIGHT_UNIT, share_of_age(age))


class Way(NamedTuple):
    """When work counts, and as what."""

    weigh: Weigh
    slow_ticks: int = TICKS
    """Time of a slow member's work; that of a fast one is a round."""
    is_fedfix: bool = False
    """Whether weights follow from the sets before, instead of `weigh`."""
    buffer: int = 0
    """Works that make an outer step; 0: what there is at the end of each round."""
    alpha_256: int = 256
    members: tuple[int, ...] = tuple(range(MEMBERS))
    slow: tuple[int, ...] = tuple(range(FAST, MEMBERS))


OLD = TICKS * TICKS
WAYS = {
    "all fast": Way(even, slow=()),
    "the fast alone": Way(even, members=tuple(range(FAST))),
    "parts of rounds, by steps": Way(by_steps),
    "parts of rounds, equal weights": Way(even),
    "old work, weight 1": Way(even, OLD),
    "old work, 1/√(1+s)": Way(by_age, OLD),
    "old work, FedFix": Way(even, OLD, is_fedfix=True),
    "FedBuff of 5": Way(by_age, OLD, buffer=5),
    "FedBuff of 5, weight 1": Way(even, OLD, buffer=5),
    "FedBuff of 2": Way(by_age, OLD, buffer=2),
    "FedBuff of 2, α 0.5": Way(by_age, OLD, buffer=2, alpha_256=128),
}


class _Work(NamedTuple):
    slot: int
    steps: int
    base: int
    delta_C4096: Tensor


def _member(path: str, weight: int) -> Member:
    name = digest(path.encode())
    return Member(name, PeerId(""), weight, name, path, ALL)


class Unequal(_Rounds):
    """Members whose work counts when it is done, or in the sets of rounds."""

    def __init__(self, task: Task, folder: Path, way: Way) -> None:
        super().__init__(task, folder, exact=True)
        self._way = way
        self._version = 0
        """Outer steps so far."""
        self._waiting: list[_Work] = []
        self._sets: list[frozenset[PeerId]] = []
        self._began = [(0, 0)] * task.members
        """Tick and version at which each member's work began."""
        speeds = {slot: 1 if slot in way.slow else STEPS // TICKS for slot in way.members}
        # By steps in a tick: those who take as many are trained together.
        self._groups = [
            (each, [slot for slot in way.members if speeds[slot] == each]) for each in sorted(set(speeds.values()))
        ]
        self._crews = {each: Crew(task.spec, len(slots)) for each, slots in self._groups}
        self._places = {
            slot: (self._crews[each], at) for each, slots in self._groups for at, slot in enumerate(slots)
        }
        self._speeds = speeds
        self._anchors = dict[int, Tensor]()
        for slot in way.members:
            self._start(slot)

    def _start(self, slot: int) -> None:
        self._anchors[slot] = to_float(self.fold.view_C4096)
        crew, at = self._places[slot]
        crew.write(at, self._anchors[slot])

    def round(self, number: int) -> Sequence[float]:
        """The ticks of a round; the losses of all steps."""
        losses: list[float] = []
        task = self._task
        for tick in range(TICKS):
            for each, slots in self._groups:
                for step in range(tick * each, tick * each + each):
                    # At the rate of that time, however many steps a member takes.
                    at = task.spec.steps_before(number) + step * STEPS // TICKS // each
                    window_MBT1 = np.stack([task.batch(number, slot, step) for slot in slots])
                    losses += self._crews[each].step(window_MBT1, at)
            self._count(number * TICKS + tick + 1)
        return losses

    def _ticks(self, slot: int) -> int:
        return self._way.slow_ticks if slot in self._way.slow else TICKS

    def _count(self, now: int) -> None:
        """Take in the work that is done at this time, and begin new one from what has counted then."""
        done = [slot for slot in self._way.members if self._is_done(slot, now)]
        for slot in done:
            self._waiting.append(self._work(slot, now))
            if self._way.buffer and len(self._waiting) >= self._way.buffer:
                self._step()
        if not self._way.buffer and self._waiting and now % TICKS == 0:
            self._step()
        for slot in done:
            self._start(slot)
            self._began[slot] = now, self._version

    def _is_done(self, slot: int, now: int) -> bool:
        began, _ = self._began[slot]
        # The first work of a member is shorter, so that later not all are done at once: in rounds one slow member
        # in each, with a buffer one fast member in each tick.
        period, at = self._ticks(slot), slot % FAST + 1
        if began == 0:
            period = at * TICKS if period > TICKS else at if self._way.buffer else period
        return now - began >= period

    def _work(self, slot: int, now: int) -> _Work:
        began, version = self._began[slot]
        crew, at = self._places[slot]
        delta_C4096 = self._anchors[slot] - crew.read(at)
        return _Work(slot, (now - began) * self._speeds[slot], version, delta_C4096)

    def _step(self) -> None:
        """One outer step of all work that waits."""
        members = []
        for at, work in enumerate(self._waiting):  # a buffer may hold two works of one member
            weight = self._weight(work)
            members.append(_member(f"{work.slot}, {at}", weight))
            self._sent_exactly[members[-1].path] = work.delta_C4096
        self._sets.append(frozenset(PeerId(str(work.slot)) for work in self._waiting))
        self._waiting = []
        self.fold.prepare_final(round_set(self._version, members))()
        self._version += 1

    def _weight(self, work: _Work) -> int:
        if self._way.is_fedfix:
            return by_rarity(WEIGHT_UNIT, self._sets[-WINDOWS * (MOST + 1) :], PeerId(str(work.slot)), MOST)
        return self._way.weigh(work.steps, self._version - work.base)

    def _exact_update(self, fresh: RoundSet, theta_N4096: Tensor) -> Tensor:
        """θ + U of weighted float32 work. A buffer divides by the number of works, as published."""
        total = torch.zeros(theta_N4096.shape, dtype=torch.float64)
        for member in sorted(fresh.members, key=lambda member: member.entry):
            total += self._sent_exactly[member.path].double() * member.weight
        weight = sum(member.weight for member in fresh.members)
        divisor = WEIGHT_UNIT * len(fresh.members) if self._way.buffer else weight
        return plus(theta_N4096, to_fixed(total * (-self._way.alpha_256 / 256 / divisor)))


LATE_WAYS = ("lost", "returns", "next round, weight 1", "next round, 1/√(1+s)")
"""What becomes of the work of a member that was late for its round."""


class Late(CrewRounds):
    """Equally fast members that are late now and then. Work counts in its own round, or as its way says."""

    def __init__(self, task: Task, folder: Path, way: str) -> None:
        super().__init__(task, folder, exact=True)
        assert way in LATE_WAYS
        self._way = way
        self._rng = np.random.default_rng(task.spec.seed)
        self._kept: dict[int, Tensor] = {}

    def round(self, number: int) -> Sequence[float]:
        """All members' steps of a round, and the fold of what counts in it."""
        losses: list[float] = []
        late_M = self._rng.random(self._task.members) < LATE
        late_M[number % len(late_M)] = False  # a set has a member
        members: list[Member] = []
        for slot, is_late in enumerate(late_M.tolist()):
            losses += self._train(number, slot)
            local_C4096 = read_module(self._learners[slot].module, arena_of(self._task.spec.model))
            work_C4096 = self._learners[slot].weights.anchor_C4096 - local_C4096
            before_C4096 = self._kept.pop(slot, None)
            if before_C4096 is not None and self._way == "returns":
                work_C4096 = work_C4096 + BETA * before_C4096
            elif before_C4096 is not None:
                weight = WEIGHT_UNIT if self._way == "next round, weight 1" else by_age(STEPS, 1)
                members.append(_member(f"{slot}, before", weight))
                self._sent_exactly[members[-1].path] = before_C4096
            if not is_late:
                members.append(_member(str(slot), WEIGHT_UNIT))
                self._sent_exactly[members[-1].path] = work_C4096
            elif self._way != "lost":
                self._kept[slot] = work_C4096
        self.fold.prepare_final(round_set(number, members))()
        return losses

    def _exact_update(self, fresh: RoundSet, theta_N4096: Tensor) -> Tensor:
        """θ + U of weighted float32 work."""
        total = torch.zeros(theta_N4096.shape, dtype=torch.float64)
        for member in sorted(fresh.members, key=lambda member: member.entry):
            total += self._sent_exactly[member.path].double() * member.weight
        return plus(theta_N4096, to_fixed(total * (-1 / sum(member.weight for member in fresh.members))))


def run(name: str, seed: int, rounds: int, size: str) -> dict[str, object]:
    """Train an arm; what it gave."""
    spec = spec_of(arm_of("average-float32", size, total=STEPS * rounds, seed=seed, steps=STEPS))
    data = open_dataset(spec.data, spec.model.context, "", default_cache())
    task = Task(spec, data, MEMBERS, spec.outer.rounds)
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        arm = Unequal(task, Path(folder), WAYS[name]) if name in WAYS else Late(task, Path(folder), name)
        for number in range(spec.outer.rounds):
            arm.round(number)
        return {"val_bpb": arm.val_bpb(), "outer_steps": arm.fold.final_round + 1}


if __name__ == "__main__":
    print_lines(run, [*WAYS, *LATE_WAYS], __doc__, f"{STEPS} steps of a fast member")
