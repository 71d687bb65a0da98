"""The worker's part in a round: inner steps, the merge with the fold that they overlap, the encoded result."""

import time
from collections.abc import Generator, Hashable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from atoll.node.learning.data.dataset import RunText
from atoll.node.learning.data.prefetch import Load, NextBatch
from atoll.node.learning.outer.fold import Fold
from atoll.node.worker.error_feedback import ErrorFeedback
from atoll.node.worker.initial_moments import InitialMoments
from atoll.node.worker.learner import Learner
from atoll.node.worker.local_weights import carries
from atoll.node.worker.privacy.uses import PrivacyAccount
from atoll.node.worker.pulls.neighbour_mixing import NeighbourMixing, mixing_of
from atoll.node.worker.schedule.time_account import TimeAccount
from atoll.node.worker.sizes.table import k_in_state
from atoll.node.worker.zeroth_order.scalar_steps import ScalarSteps
from atoll.protocols.blobs import manifest_of_bytes
from atoll.protocols.data.shard_order import Turn
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


@dataclass(slots=True)
class Budget:
    """The steps of a round and the sequences of each, until its time is over. Pure."""

    ask: TrainRequest
    steps: int
    sequences: int
    """Of the next step."""
    taken: int = 0
    """Sequences that were taken."""

    def took_step(self, steps: int, trained_s: float) -> None:
        """The `steps`-th step is done, `trained_s` seconds after the round began, without any waiting."""
        self.taken += self.sequences
        if 0 < self.ask.limit_s < trained_s:
            self.steps = min(self.steps, max(self.ask.least_steps, steps))
            self.sequences = min(self.sequences, self.ask.least_sequences)


@dataclass(kw_only=True, slots=True)
class RoundTrainer:
    """Trains one round at a time. Reads the view of `fold`; changes the local weights and the error feedback."""

    spec: RunSpec
    peer: PeerId
    """PeerID of this node."""
    data: RunText | None
    """None where nothing is trained."""
    learner: Learner
    fold: Fold
    feedback: ErrorFeedback
    spent: TimeAccount
    moments: InitialMoments
    """Those that round 0 may begin with."""
    scalars: ScalarSteps | None = None
    """What takes the steps of a zeroth-order run and makes its payloads; None in other runs."""
    privacy: PrivacyAccount | None = None
    """What counts the uses of the data in a run with privacy; None in other runs."""
    mixing: NeighbourMixing | None = field(init=False)
    """What mixes differences of neighbours into the local weights; None in runs without gossip."""
    batches: NextBatch = field(default_factory=NextBatch)
    steps_taken: int = 0
    """Inner steps of this node, in all rounds."""

    def __post_init__(self) -> None:
        self.mixing = mixing_of(self.spec, self.feedback.encoder)

    def train(self, ask: TrainRequest) -> Generator[Step, None, tuple[TrainReply, bytearray]]:
        """Take the steps of a round one at a time; returns the result, which is nowhere on the disk yet.

        Raises PrivacySpent before the first step.
        """
        began = self._now_s()
        turn = Turn(ask.round, self.peer, ask.slot, ask.slots)
        budget = Budget(ask, ask.steps, ask.sequences or self.spec.inner.batch)
        if self.privacy is not None:
            each = range(0, budget.steps * budget.sequences, budget.sequences)
            self.privacy.begin_round(self._window_indices(turn, first, budget.sequences) for first in each)
        overlap = self._begin(ask)
        base, losses = self.fold.view_digest(), list[float]()
        while True:
            if (yield from self._merge_due_fold(overlap, len(losses))):
                base = self.fold.view_digest()
            if len(losses) == budget.steps:
                break
            losses.append(self._step(turn, budget, self.spec.steps_before(ask.round) + len(losses), len(losses)))
            self.steps_taken += 1
            trained_s = max(1e-9, self._now_s() - began - overlap.held_s)
            budget.took_step(len(losses), trained_s)
            if self._is_oldest(ask.round):
                budget.steps = len(losses)
            overlap.most = min(overlap.most, budget.steps)
            if len(losses) == budget.steps:  # now: a fold may still be merged before the round ends
                self.learner.agree()
            speed = budget.taken * self.spec.model.context / trained_s
            yield TrainProgress(ask.round, len(losses), budget.steps, losses[-1], speed, self.uses)
        train_s = self._now_s() - began - overlap.held_s
        with self.spent.within("encode"):
            number = self._counts_in(ask.round)
            payload = self._encoded(number)
        if self.mixing is not None:
            self.mixing.end(ask.round, payload)
        tokens = budget.taken * self.spec.model.context
        form = bytes([number - ask.round] if number > ask.round else [])
        if self.spec.reduce:
            form = RowTree(memoryview(payload), self.feedback.layout(number, self.learner.experts)).root
        done = self._pending(number, form, base, losses, payload, tokens)
        trained = TrainReply(
            pending=done,
            payload_bytes=len(payload),
            train_s=train_s,
            overlapped=overlap.steps,
            held_s=overlap.held_s,
            uses=self.uses,
            pulls=self.mixing.pulls if self.mixing is not None else 0,
        )
        return trained, payload

    def _counts_in(self, began: Round) -> Round:
        """The round that takes work which ends now."""
        stale = self.spec.pace.stale
        if not stale:
            return began
        return min(stale.counts_in(began, self.fold.final_round), Round(self.spec.outer.rounds - 1))

    def _is_oldest(self, began: Round) -> bool:
        """Whether work that began in this round must end now: no later round may take it."""
        stale = self.spec.pace.stale
        return self.fold.final_round + 1 >= began + stale.most if stale else False

    @property
    def uses(self) -> int:
        """Most steps of this node that used one sequence; 0 in a run without privacy."""
        return self.privacy.uses.most if self.privacy is not None else 0

    def _encoded(self, number: Round) -> bytearray:
        if self.scalars is not None:
            return self.scalars.payload(self.feedback.layout(number, self.learner.experts))
        if self.spec.compress.sizes:
            self.feedback.chosen_T = k_in_state(self.spec, self.fold.final_state_S4096)
        return self.feedback.encode(number, self.learner.weights)

    def _now_s(self) -> float:
        """Seconds of a clock that stands still in audits and evaluations: they say nothing of a round's speed."""
        return time.monotonic() - self.spent.besides_s

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
        if self.scalars is not None:
            self.scalars.begin(ask.round, self.fold.view_C4096)
        if self.mixing is not None:
            self.mixing.begin(ask.round)
        return Overlap(due, min(ask.ahead, ask.steps))

    def _merge_due_fold(self, overlap: Overlap, taken: int) -> Generator[None, None, bool]:
        """Wait for the fold that is due, if no more steps may be taken before it; whether it came now."""
        began, held_s = self._now_s(), overlap.held_s
        while overlap.must_wait(taken, self.fold.holds(overlap.after)):
            yield None
            overlap.held_s = held_s + self._now_s() - began
        if not overlap.is_due or not self.fold.holds(overlap.after):
            return False
        self.learner.weights.merge(self.fold.view_C4096, arrived=True)
        overlap.fold_arrived(taken)
        return True

    def _step(self, turn: Turn, budget: Budget, at: int, number: int) -> float:
        """Global step `at`, on the next windows of our turn; returns its loss. `number`: in the round, from 0."""
        with self.spent.one_step():
            batch_BT1 = self.batches.get(*self._windows(turn, budget.taken, budget.sequences))
            if number + 1 < budget.steps:  # of as many sequences; where these change, another batch is loaded
                self.batches.begin(*self._windows(turn, budget.taken + budget.sequences, budget.sequences))
            if self.privacy is not None:  # also of a step that fails: it has read them
                self.privacy.uses.use(self._window_indices(turn, budget.taken, budget.sequences))
            return (self.scalars or self.learner).step(batch_BT1, at)

    def _windows(self, turn: Turn, first: int, count: int) -> tuple[Hashable, Load]:
        """A name of these windows of our turn, and what loads them."""
        assert self.data is not None, "who trains has the text"
        data = self.data
        return (turn, first, count), lambda: data.batch(self._window_indices(turn, first, count))

    def _window_indices(self, turn: Turn, first: int, count: int) -> NDArray[np.int64]:
        assert self.data is not None, "who trains has the text"
        return self.data.windows_of(self.spec, turn, np.arange(first, first + count))

    def _pending(
        self, number: Round, form: bytes, base: Digest, losses: list[float], payload: bytearray, tokens: int
    ) -> Pending:
        blob = manifest_of_bytes(payload).id
        weight = weight_of(tokens, self.spec.nominal_tokens(number))
        return Pending(
            round=number,
            base=base,
            payload=blob,
            path=str(self.feedback.path_of(blob)),
            steps=len(losses),
            tokens=tokens,
            weight=weight,
            loss=sum(losses) / len(losses),
            experts=self.learner.experts,
            form=form,
        )


def weight_of(tokens: int, nominal_tokens: int) -> int:
    """Weight of a contribution, 1 … 255: its share of the round's nominal tokens, in 64ths, rounded."""
    return max(1, min(MAX_WEIGHT, (2 * tokens * WEIGHT_UNIT + nominal_tokens) // (2 * nominal_tokens)))
