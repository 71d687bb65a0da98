"""Trains one arm of `bench convergence` in one process: every step, payload and fold is the product's.

Members have the worker's learner, local weights, error feedback and encoder, take their rounds one after the
other, and share one fold, which is the same on all of them. There is no network and no daemon, so a run costs the
time of its arithmetic alone. With `exact` the contributions are float32 tensors that no codec changed: the mean of
what the members did, rounded once to the fold's fixed point.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from atoll.node.learning.compress.codecs import OnHost
from atoll.node.learning.data.dataset import Dataset
from atoll.node.learning.inner.evaluate import evaluate
from atoll.node.learning.model.decoder import loss_of
from atoll.node.learning.outer.fixed import plus, to_fixed
from atoll.node.learning.outer.fold import RoundSet, round_set
from atoll.node.worker.error_feedback import ErrorFeedback
from atoll.node.worker.folding.fold_requests import fold_of
from atoll.node.worker.folding.set_update import SetUpdate
from atoll.node.worker.learner import Learner
from atoll.node.worker.local_weights import carries
from atoll.node.worker.round_trainer import WEIGHT_UNIT
from atoll.node.worker.sizes.table import k_in_state
from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import PeerId, digest
from atoll.protocols.local.worker_messages import Member
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.experts import ALL
from atoll.protocols.run.run_spec import RunSpec
from atoll_bench.convergence.arms import MEMBERS, Arm, spec_of
from atoll_bench.inner_steps import run_steps
from atoll_bench.module_values import read_module
from atoll_bench.reference_arms.baselines import Task

VALIDATION_TOKENS = 1 << 15
POINTS = 15
"""Validations of a run, about as many tokens apart."""


class Point(msgspec.Struct, frozen=True, array_like=True):
    """An arm after some rounds."""

    steps: int
    """Inner steps of a member."""
    tokens: int
    """Of all members."""
    sent_bytes: int
    """Payloads that one member sent; with data-parallel training a float32 gradient each step."""
    train_loss: float
    """Mean of the steps since the last point, nats per token."""
    val_bpb: float
    """Validation loss, bits per byte."""


def trained(arm: Arm, data: Dataset, folder: Path, device: str = "cpu") -> Iterator[Point | None]:
    """Train an arm; yields after each round, a Point where it was validated. `folder` is written to.

    Raises ConfigError, Divergence.
    """
    if device == "cpu":
        torch.set_num_threads(1)  # the bits depend on it
    spec = spec_of(arm)
    task = Task(spec, data, MEMBERS, spec.outer.rounds, device)
    # Of a run with data-parallel steps each step is a round.
    every = max(1, spec.outer.rounds // POINTS)
    run = _Parallel(task) if arm.parallel else _Rounds(task, folder, exact=arm.exact)
    losses: list[float] = []
    for number in range(spec.outer.rounds):
        losses += run.round(number)
        if (number + 1) % every and number + 1 < spec.outer.rounds:
            yield None
            continue
        steps = spec.steps_before(number + 1)
        tokens = steps * MEMBERS * spec.inner.batch * spec.model.context
        yield Point(steps, tokens, run.sent_bytes, float(np.mean(losses)), run.val_bpb())
        losses = []


class _Parallel:
    """One model, and a batch of all members' windows in each step: full synchrony."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._inner = task.inner()
        self._val_WT1, self._val_bytes = validation_of(task.spec, task.data)
        self.sent_bytes = 0

    def round(self, number: int) -> Sequence[float]:
        """The steps of a round; their losses."""
        task = self._task

        def batch(step: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
            return np.concatenate([task.batch(number, slot, step) for slot in range(task.members)])

        losses = list(run_steps(self._inner.step, batch, task.spec.steps_before(number), task.spec.steps(number)))
        self.sent_bytes += len(losses) * 4 * task.spec.model.parameters
        return losses

    def val_bpb(self) -> float:
        """Validation loss, bits per byte."""
        return evaluate(self._inner.module, loss_of, self._val_WT1, self._val_bytes).val_bpb


class _Rounds:
    """Members that train apart and fold their work after each round."""

    def __init__(self, task: Task, folder: Path, *, exact: bool) -> None:
        spec = task.spec
        if spec.outer.fragments > 1 or spec.reduce or spec.start or (exact and spec.outer.overlap_steps):
            raise ConfigError("an arm has whole rounds that are not reduced, from fresh weights")
        self._task, self._folder, self._exact = task, folder, exact
        self._sent_exactly: dict[str, Tensor] = {}
        self.fold = fold_of(spec, self._exact_update if exact else SetUpdate(spec, None, 1))
        self._learners = [Learner(spec, task.device) for _ in range(task.members)]
        self._feedback = [ErrorFeedback(spec, folder / f"member-{slot}", OnHost()) for slot in range(task.members)]
        self._before_C4096 = self.fold.view_C4096
        self._val_WT1, self._val_bytes = validation_of(spec, task.data)
        self.sent_bytes = 0
        for learner in self._learners:
            learner.set_trained_experts(ALL)

    def round(self, number: int) -> Sequence[float]:
        """All members' steps of a round, and the fold of what they send; the losses of all steps."""
        losses: list[float] = []
        members: list[Member] = []
        for slot in range(self._task.members):
            losses += self._train(number, slot)
            size_bytes, member = self._send(number, slot)
            members.append(member)
        self.sent_bytes += size_bytes
        self._before_C4096 = self.fold.view_C4096
        self.fold.prepare_final(round_set(number, members))()
        return losses

    def val_bpb(self) -> float:
        """Validation loss of the fold, bits per byte."""
        return self._learners[0].evaluate(self.fold.view_C4096, self._val_WT1, self._val_bytes).val_bpb

    def _train(self, number: int, slot: int) -> list[float]:
        """As `RoundTrainer` does it: the first steps of a round may come before the fold of the round before."""
        spec, learner = self._task.spec, self._learners[slot]
        steps = spec.steps(number)
        ahead = min(spec.outer.overlap_steps, steps) if number else 0
        if carries(spec) and number:
            learner.weights.merge(self._before_C4096, arrived=False)
            losses = self._steps(number, slot, 0, ahead)
            learner.weights.merge(self.fold.view_C4096, arrived=True)
        else:
            losses = []
            learner.weights.start(self.fold.view_C4096)
        return losses + self._steps(number, slot, ahead, steps - ahead)

    def _steps(self, number: int, slot: int, first: int, count: int) -> list[float]:
        task, learner = self._task, self._learners[slot]
        at = task.spec.steps_before(number) + first
        return list(run_steps(learner.step, lambda step: task.batch(number, slot, first + step), at, count))

    def _send(self, number: int, slot: int) -> tuple[int, Member]:
        """A member's contribution, where the fold finds it: bytes of its payload, and its place in the set."""
        weights, path = self._learners[slot].weights, self._folder / f"payload-{slot}"
        if self._exact:
            local_C4096 = read_module(self._learners[slot].module, arena_of(self._task.spec.model)).cpu()
            self._sent_exactly[str(path)] = weights.anchor_C4096 - local_C4096
            size_bytes = 4 * self._task.spec.model.parameters
        else:
            if self._task.spec.compress.sizes:
                self._feedback[slot].chosen_T = k_in_state(self._task.spec, self.fold.final_state_S4096)
            payload = self._feedback[slot].encode(number, weights)
            path.write_bytes(payload)
            size_bytes = len(payload)
        name = digest(bytes([slot]))
        return size_bytes, Member(name, PeerId(""), WEIGHT_UNIT, name, str(path), ALL)

    def _exact_update(self, fresh: RoundSet, theta_N4096: Tensor) -> Tensor:
        """θ + U of float32 contributions of equal weight."""
        outer = self._task.spec.outer
        alpha = 1.0 if outer.momenta else outer.alpha_256 / 256
        total = torch.zeros(theta_N4096.shape, dtype=torch.float64)
        for member in sorted(fresh.members, key=lambda member: member.entry):
            total += self._sent_exactly[member.path]
        return plus(theta_N4096, to_fixed(total * (-alpha / len(fresh.members))))


def validation_of(spec: RunSpec, data: Dataset) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.int64]], int]:
    """Windows that every arm is validated on, and the bytes that they stand for."""
    windows = max(1, VALIDATION_TOKENS // spec.model.context)
    return data.validation(windows), data.validation_bytes(windows)
