"""The worker's part in a round: inner steps, the meeting with the fold that they overlap, the encoded result."""

import time
from collections.abc import Generator, Iterator
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from atoll.node.learning.data.dataset import Dataset
from atoll.node.learning.data.windows import WindowPlace, windows
from atoll.node.learning.inner.loop import run_steps
from atoll.node.learning.outer.fold import Fold
from atoll.node.worker.error_feedback import ErrorFeedback
from atoll.node.worker.initial_moments import Brought
from atoll.node.worker.learner import Learner
from atoll.node.worker.local_weights import carries
from atoll.node.worker.overlap import Overlap
from atoll.node.worker.time_account import TimeAccount
from atoll.protocols.blobs import manifest_of_bytes
from atoll.protocols.ids import Digest, Round
from atoll.protocols.ledger.records import MAX_WEIGHT
from atoll.protocols.ledger.rows import RowTree
from atoll.protocols.local.worker_messages import Pending, TrainProgress, TrainReply, TrainRequest
from atoll.protocols.run.run_spec import RunSpec

WEIGHT_UNIT = 64
"""Weight of a member that trained on the round's nominal tokens."""
Step: TypeAlias = TrainProgress | None
"""None: nothing can be done before another ask of the daemon was answered."""


class RoundTrainer:
    """Trains one round at a time. Reads the view of `fold`; changes the local weights and the error feedback."""

    def __init__(
        self,
        spec: RunSpec,
        data: Dataset,
        learner: Learner,
        fold: Fold,
        sending: ErrorFeedback,
        spent: TimeAccount,
        brought: Brought,
    ) -> None:
        self._spec, self._data, self._learner, self._spent = spec, data, learner, spent
        self._fold, self._sending, self._brought = fold, sending, brought
        self.steps_taken = 0
        """Inner steps of this node, in all rounds."""

    def train(self, ask: TrainRequest) -> Generator[Step, None, tuple[TrainReply, bytearray]]:
        """Take the steps of a round one at a time; returns the result, which is nowhere on the disk yet."""
        began = time.monotonic()
        overlap = self._begin(ask)
        base, losses = self._fold.view_digest(), list[float]()
        steps = self._inner_steps(ask)
        while True:
            if (yield from self._meet(overlap, len(losses))):
                base = self._fold.view_digest()
            if len(losses) == ask.steps:
                break
            losses.append(next(steps))
            self.steps_taken += 1
            if len(losses) == ask.steps:  # now: a fold may still be merged before the round ends
                self._learner.agree()
            speed = len(losses) * self._step_tokens / max(1e-9, time.monotonic() - began - overlap.held_s)
            yield TrainProgress(ask.round, len(losses), ask.steps, losses[-1], speed)
        train_s = time.monotonic() - began - overlap.held_s
        with self._spent.within("encode"):
            payload = self._sending.encode(ask.round, self._learner.weights)
        done = self._pending(ask.round, base, losses, payload)
        return TrainReply(done, len(payload), train_s, overlap.steps, overlap.held_s), payload

    def _begin(self, ask: TrainRequest) -> Overlap:
        """Bring the local weights to where the round begins, in a module that trains what is asked for."""
        self._learner.own(ask.experts)
        if ask.round == 0:
            self._brought.give(self._learner, self._sending)
        weights = self._learner.weights
        due = ask.after if not self._fold.holds(ask.after) else -1
        if carries(self._spec):
            weights.merge(self._fold.view_C4096, arrived=due < 0 or weights.sent != due)
        else:
            weights.start(self._fold.view_C4096)
        return Overlap(due, min(ask.ahead, ask.steps))

    def _meet(self, overlap: Overlap, taken: int) -> Generator[None, None, bool]:
        """Wait for the fold that is due, if no more steps may be taken before it; whether it came now."""
        began, held_s = time.monotonic(), overlap.held_s
        while overlap.must_wait(taken, self._fold.holds(overlap.after)):
            yield None
            overlap.held_s = held_s + time.monotonic() - began
        if not overlap.is_due or not self._fold.holds(overlap.after):
            return False
        self._learner.weights.merge(self._fold.view_C4096, arrived=True)
        overlap.met(taken)
        return True

    def _inner_steps(self, ask: TrainRequest) -> Iterator[float]:
        first = self._spec.steps_before(ask.round)
        place = WindowPlace(self._spec.seed, first, ask.slot, ask.slots, self._spec.inner.batch)
        return run_steps(self._learner.step, partial(self._batch, place), first, ask.steps)

    def _batch(self, place: WindowPlace, step: int) -> NDArray[np.int64]:
        return self._data.batch(windows(place, step, self._data.num_windows))

    @property
    def _step_tokens(self) -> int:
        return self._spec.inner.batch * self._spec.model.context

    def _pending(self, number: Round, base: Digest, losses: list[float], payload: bytearray) -> Pending:
        blob = manifest_of_bytes(payload).id
        tokens = len(losses) * self._step_tokens
        weight = weight_of(tokens, self._spec.steps(number) * self._step_tokens)
        path, loss = str(self._sending.path_of(blob)), sum(losses) / len(losses)
        experts = self._learner.experts
        layout = self._sending.layout(number, experts)
        rows = RowTree(memoryview(payload), layout).root if self._spec.reduce else b""
        return Pending(number, base, blob, path, len(losses), tokens, weight, loss, experts, rows)


def weight_of(tokens: int, nominal_tokens: int) -> int:
    """1 … 255: the share of the round's nominal tokens, in 64ths, rounded to the nearest."""
    return max(1, min(MAX_WEIGHT, (2 * tokens * WEIGHT_UNIT + nominal_tokens) // (2 * nominal_tokens)))
