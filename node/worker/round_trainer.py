"""The worker's part in a round: inner steps, the merge with the fold that they overlap, the encoded result."""

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from atoll.node.learning.data.dataset import Dataset, WindowPlace, assigned, windows
from atoll.node.learning.inner.loop import run_steps
from atoll.node.learning.outer.fold import Fold
from atoll.node.worker.error_feedback import ErrorFeedback
from atoll.node.worker.initial_moments import InitialMoments
from atoll.node.worker.learner import Learner
from atoll.node.worker.local_weights import carries
from atoll.node.worker.time_account import TimeAccount
from atoll.protocols.blobs import manifest_of_bytes
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.records import MAX_WEIGHT
from atoll.protocols.ledger.rows import RowTree
from atoll.protocols.local.worker_messages import Pending, TrainProgress, TrainReply, TrainRequest
from atoll.protocols.run.run_spec import RunSpec

WEIGHT_UNIT = 64
"""Weight of a member that trained on the round's nominal tokens."""
Step: TypeAlias = TrainProgress | None
"""Progress, or None where nothing can be done before another request of the daemon was answered."""


@dataclass(slots=True)
class Overlap:
    """How far a round may run ahead of the fold of `after`, which may still be due, and what came of it. Pure."""

    after: int
    """Round whose fold is due; −1: none."""
    most: int
    """Inner steps that may be taken before that fold is in."""
    steps: int = 0
    """Inner steps that were taken before it was in."""
    held_s: float = 0.0
    """Time spent waiting for it."""
    is_due: bool = True

    def __post_init__(self) -> None:
        self.is_due = self.after >= 0

    def must_wait(self, taken: int, is_in: bool) -> bool:
        """Whether nothing may be done after `taken` steps before the fold is in."""
        return self.is_due and not is_in and taken >= self.most

    def fold_arrived(self, taken: int) -> None:
        """The fold came in after `taken` steps."""
        self.is_due = False
        self.steps = taken


@dataclass(kw_only=True, slots=True)
class RoundTrainer:
    """Trains one round at a time. Reads the view of `fold`; changes the local weights and the error feedback."""

    spec: RunSpec
    peer: PeerId
    """PeerID of this node."""
    data: Dataset
    learner: Learner
    fold: Fold
    feedback: ErrorFeedback
    spent: TimeAccount
    moments: InitialMoments
    """Those that round 0 may begin with."""
    steps_taken: int = 0
    """Inner steps of this node, in all rounds."""

    def train(self, ask: TrainRequest) -> Generator[Step, None, tuple[TrainReply, bytearray]]:
        """Take the steps of a round one at a time; returns the result, which is nowhere on the disk yet."""
        began = time.monotonic()
        overlap = self._begin(ask)
        base, losses = self.fold.view_digest(), list[float]()
        steps = self._inner_steps(ask)
        while True:
            if (yield from self._merge_due_fold(overlap, len(losses))):
                base = self.fold.view_digest()
            if len(losses) == ask.steps:
                break
            losses.append(next(steps))
            self.steps_taken += 1
            if len(losses) == ask.steps:  # now: a fold may still be merged before the round ends
                self.learner.agree()
            speed = len(losses) * self._step_tokens / max(1e-9, time.monotonic() - began - overlap.held_s)
            yield TrainProgress(ask.round, len(losses), ask.steps, losses[-1], speed)
        train_s = time.monotonic() - began - overlap.held_s
        with self.spent.within("encode"):
            payload = self.feedback.encode(ask.round, self.learner.weights)
        done = self._pending(ask.round, base, losses, payload)
        trained = TrainReply(
            pending=done,
            payload_bytes=len(payload),
            train_s=train_s,
            overlapped=overlap.steps,
            held_s=overlap.held_s,
        )
        return trained, payload

    def _begin(self, ask: TrainRequest) -> Overlap:
        """Bring the local weights to where the round begins, in a module that trains what is asked for."""
        self.learner.set_trained_experts(ask.experts)
        if ask.round == 0:
            self.moments.load_into(self.learner, self.feedback)
        weights = self.learner.weights
        due = ask.after if not self.fold.holds(ask.after) else -1
        if carries(self.spec):
            weights.merge(self.fold.view_C4096, arrived=due < 0 or weights.sent != due)
        else:
            weights.start(self.fold.view_C4096)
        return Overlap(due, min(ask.ahead, ask.steps))

    def _merge_due_fold(self, overlap: Overlap, taken: int) -> Generator[None, None, bool]:
        """Wait for the fold that is due, if no more steps may be taken before it; whether it came now."""
        began, held_s = time.monotonic(), overlap.held_s
        while overlap.must_wait(taken, self.fold.holds(overlap.after)):
            yield None
            overlap.held_s = held_s + time.monotonic() - began
        if not overlap.is_due or not self.fold.holds(overlap.after):
            return False
        self.learner.weights.merge(self.fold.view_C4096, arrived=True)
        overlap.fold_arrived(taken)
        return True

    def _inner_steps(self, ask: TrainRequest) -> Iterator[float]:
        first = self.spec.steps_before(ask.round)
        place = WindowPlace(self.spec.seed, first, ask.slot, ask.slots, self.spec.inner.batch)
        if self.spec.audit:
            place = assigned(self.spec.seed, ask.round, self.peer, self.spec.inner.batch)
        return run_steps(self.learner.step, partial(self._batch, place), first, ask.steps)

    def _batch(self, place: WindowPlace, step: int) -> NDArray[np.int64]:
        return self.data.batch(windows(place, step, self.data.num_windows))

    @property
    def _step_tokens(self) -> int:
        return self.spec.inner.batch * self.spec.model.context

    def _pending(self, number: Round, base: Digest, losses: list[float], payload: bytearray) -> Pending:
        blob = manifest_of_bytes(payload).id
        tokens = len(losses) * self._step_tokens
        weight = weight_of(tokens, self.spec.steps(number) * self._step_tokens)
        experts = self.learner.experts
        layout = self.feedback.layout(number, experts)
        return Pending(
            round=number,
            base=base,
            payload=blob,
            path=str(self.feedback.path_of(blob)),
            steps=len(losses),
            tokens=tokens,
            weight=weight,
            loss=sum(losses) / len(losses),
            experts=experts,
            rows=RowTree(memoryview(payload), layout).root if self.spec.reduce else b"",
        )


def weight_of(tokens: int, nominal_tokens: int) -> int:
    """Weight of a contribution, 1 … 255: its share of the round's nominal tokens, in 64ths, rounded."""
    return max(1, min(MAX_WEIGHT, (2 * tokens * WEIGHT_UNIT + nominal_tokens) // (2 * nominal_tokens)))
