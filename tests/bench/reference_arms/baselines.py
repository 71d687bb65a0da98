"""What the swarm is measured against, in one process: data-parallel AdamW and dense DiLoCo at equal tokens.

Both read exactly the windows that the swarm's members read, in the same inner steps, from the same Θ₀.
They yield one Point per round, so that a caller can print, plot or stop.
"""

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from atoll.node.checkpoint.snapshot import read_snapshot
from atoll.node.learning.data.dataset import Dataset, WindowPlace, windows
from atoll.node.learning.inner.evaluate import VAL_WINDOWS, ValidationLoss, evaluate
from atoll.node.learning.inner.loop import Inner
from atoll.node.learning.inner.step_share import ALONE
from atoll.node.learning.model import bridge
from atoll.node.learning.model.decoder import Decoder, loss_of
from atoll.node.learning.model.genesis import genesis
from atoll.node.learning.model.moe import bias_updater
from atoll.node.learning.outer.fixed import state_digest, to_float
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.run_spec import RunSpec
from atoll_bench.inner_steps import run_steps
from atoll_bench.module_values import fill_module, read_module


def unigram_bits_per_byte(text: bytes) -> float:
    """Entropy of the byte frequencies: what a model that only counts bytes would reach."""
    counts = np.bincount(np.frombuffer(text, np.uint8), minlength=256)
    share = counts[counts > 0] / max(len(text), 1)
    return -math.fsum(float(p) * math.log2(p) for p in share)


class Point(msgspec.Struct, frozen=True):
    """One arm after one round."""

    round: int
    tokens: int
    """Of all members, since the start."""
    train_loss: float
    """Mean of the round's inner steps, nats per token."""
    val_bpb: float
    seconds: float
    """Since the start, evaluation included."""


class OuterRule(NamedTuple):
    """θ ← θ − rate · (Δ + momentum · v) with v = momentum · v + Δ (Nesterov); (1, 0) is plain averaging."""

    rate: float
    momentum: float


DILOCO = OuterRule(0.7, 0.9)
"""DiLoCo's own setting (arXiv 2311.08105), for runs of hundreds of rounds."""
TUNED = DILOCO._replace(rate=0.125)
"""The best of four outer rates that were tried in the 54 rounds of the `tiny` preset (docs/calibration.md)."""
AVERAGE = OuterRule(1.0, 0.0)


class Task(NamedTuple):
    """What all arms have in common."""

    spec: RunSpec
    data: Dataset
    members: int
    rounds: int
    device: str = "cpu"
    start: Path | None = None
    """The file of Θ₀, of a run that has one."""
    present: Sequence[int] = ()
    """Members of each round, where their number changes."""
    quantized: bool = False
    """Whether moments are stored in eight bits."""

    def slots(self, number: int) -> int:
        """Members of a round."""
        return self.present[number] if self.present else self.members

    def genesis_C4096(self) -> Tensor:
        """Θ₀ as float32. Raises DecodeError, DiskFault."""
        arena = arena_of(self.spec.model)
        if self.spec.start:
            assert self.start is not None, "the run's start weights are a file"
            return to_float(read_snapshot(self.start, arena, state_digest).theta_C4096)
        theta = {name: torch.from_numpy(value) for name, value in genesis(self.spec.model, self.spec.seed).items()}
        return to_float(bridge.gather(theta, arena))

    def inner(self, lr_scale: float = 1.0) -> Inner:
        """A fresh member with the values Θ₀."""
        model = Decoder(self.spec.model).to(self.device)
        fill_module(model, self.genesis_C4096(), arena_of(self.spec.model))
        inner = self.spec.inner
        # The factor of a run with few holders would do harm here, where all train all experts.
        expert_lr = 1.0 if self.spec.outer.holders else inner.expert_lr
        scaled = msgspec.structs.replace(inner, lr=inner.lr * lr_scale, expert_lr=expert_lr)
        after_step = bias_updater(model, self.spec.model, ALONE.total)
        return Inner(model, loss_of, scaled, after_step=after_step, quantized=self.quantized)

    def batch(self, number: int, slot: int, step: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        """Windows `[batch, context + 1]` that member `slot` reads in a step of a round."""
        spec = self.spec
        place = WindowPlace(spec.seed, spec.steps_before(number), slot, self.slots(number), spec.inner.batch)
        return self.data.batch(windows(place, step, self.data.num_windows))

    def score(self, model: torch.nn.Module) -> ValidationLoss:
        """Validation of a model on the run's windows."""
        val_WT1 = self.data.validation(VAL_WINDOWS)
        return evaluate(model, loss_of, val_WT1, self.data.validation_bytes(VAL_WINDOWS))

    def point(self, number: int, losses: list[float], model: torch.nn.Module, began: float) -> Point:
        """The arm's state after round `number`."""
        steps = sum(self.spec.steps(at) * self.slots(at) for at in range(number + 1))
        tokens = steps * self.spec.inner.batch * self.spec.model.context
        val_bpb = self.score(model).val_bpb
        return Point(number, tokens, float(np.mean(losses)), val_bpb, time.monotonic() - began)


def data_parallel(task: Task, lr_scale: float = 1.0) -> Iterator[Point]:
    """One model, AdamW, a batch of all members' windows per step: full synchrony at equal steps and tokens.

    `lr_scale` multiplies the spec's rate: a batch that is `members` times larger may want more.
    """
    began = time.monotonic()
    inner = task.inner(lr_scale)
    for number in range(task.rounds):

        def batch(step: int, number: int = number) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
            return np.concatenate([task.batch(number, slot, step) for slot in range(task.slots(number))])

        first, steps = task.spec.steps_before(number), task.spec.steps(number)
        losses = list(run_steps(inner.step, batch, first, steps))
        yield task.point(number, losses, inner.module, began)


def dense_diloco(task: Task, rule: OuterRule = DILOCO) -> Iterator[Point]:
    """Uncompressed DiLoCo with the spec's H stages: fp32 mean of the pseudo-gradients, outer Nesterov SGD."""
    began = time.monotonic()
    arena = arena_of(task.spec.model)
    theta = task.genesis_C4096()
    momentum = torch.zeros_like(theta)
    members = [task.inner() for _ in range(max(map(task.slots, range(task.rounds))))]
    for number in range(task.rounds):
        losses: list[float] = []
        mean = torch.zeros_like(theta)
        present = members[: task.slots(number)]
        for slot, inner in enumerate(present):
            losses += member_round(task, inner, theta, number, slot)
            mean += (theta - read_module(inner.module, arena).cpu()) / len(present)
        momentum = rule.momentum * momentum + mean
        theta = theta - rule.rate * (mean + rule.momentum * momentum)
        fill_module(members[0].module, theta, arena)
        yield task.point(number, losses, members[0].module, began)


def member_round(task: Task, inner: Inner, theta_C4096: Tensor, number: int, slot: int) -> list[float]:
    """One member's inner steps of a round from θ; its losses. Its module then holds the local weights."""
    fill_module(inner.module, theta_C4096, arena_of(task.spec.model))
    first, steps = task.spec.steps_before(number), task.spec.steps(number)
    return list(run_steps(inner.step, lambda step: task.batch(number, slot, step), first, steps))
