"""This node's own training: asks the worker for rounds, saves them, and announces the contributions."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from atoll.node.daemon.coordinator.contribution_sets import ContributionIndex
from atoll.node.daemon.coordinator.leases import MemberLeases
from atoll.node.daemon.coordinator.moment_transfer import MomentTransfer
from atoll.node.daemon.core.interfaces import Network, RoundAssets, RunContext
from atoll.node.daemon.core.runtime import FaultGuard, Machines, WorkerClient
from atoll.node.daemon.experts.expert_assignment import ExpertAssignment
from atoll.node.daemon.rounds.leaps import holders_at_work, members_at_work
from atoll.node.daemon.rounds.state import Phase
from atoll.node.daemon.rounds.types import StartTraining, TrainingRefused, TrainingSaved, trained_of
from atoll.node.daemon.steps import step_budget
from atoll.p2p.blobs.payloads_again import PayloadsAgain
from atoll.protocols.data.shard_order import Turn
from atoll.protocols.errors import DiskFault, PrivacySpent, Superseded
from atoll.protocols.ids import Digest, Round
from atoll.protocols.ledger.records import Verdict
from atoll.protocols.ledger.registers import LOSS_END
from atoll.protocols.local import worker_messages
from atoll.protocols.local.contribution_forms import contribution_of


@dataclass(slots=True, kw_only=True)
class LocalTraining:
    """Performs StartTraining and Announce of the round machine."""

    context: RunContext
    net: Network
    machines: Machines
    worker: WorkerClient
    guard: FaultGuard
    contributions: ContributionIndex
    assignment: ExpertAssignment
    moments: MomentTransfer
    leases: MemberLeases
    assets: RoundAssets
    verdicts: Callable[[], tuple[Verdict, ...] | None]
    """Returns the verdicts for the next contribution; None in a run without audits."""
    applied: Callable[[], Round]
    """Returns the newest round in the worker's Θ_final."""
    is_reduced: Callable[[int], bool]
    """Returns whether the reducers of a round are known."""
    progress: worker_messages.TrainProgress | None = None
    """The newest inner step of the round in training."""
    waiting: str = ""
    """What a round that has begun waits for before its first step."""
    loss: float = 0.0
    """Mean training loss of the newest round since the start, for others; 0: none, or a run with privacy."""
    uses: int | None = None
    """Most steps of this node that used one sequence, in a run with privacy; None before its worker said it."""
    lost: frozenset[Round] = frozenset()
    """Rounds of own contributions that may be open and whose payloads this node's worker has not."""
    starts: step_budget.RoundStarts = field(default_factory=step_budget.RoundStarts)
    """When its newest rounds began."""
    _tempo: step_budget.Tempo = field(init=False)

    def __post_init__(self) -> None:
        self._tempo = step_budget.tempo_of(self.context.spec, self.context.devices)

    @property
    def tokens_per_s(self) -> float:
        """This node's speed; 0 before it is known."""
        return self._tempo.tokens_per_s or (self.progress.tokens_per_s if self.progress else 0.0)

    async def train(self, action: StartTraining) -> None:
        """Train one round and save it. Raises WorkerDied, Superseded."""
        request = self._request(action)
        await self._prepare(action)
        try:
            done = await self.worker.ask_until_saved(
                request, worker_messages.TrainReply, lambda: self._check_need(action.round)
            )
        except PrivacySpent as error:
            logging.getLogger(__name__).warning("%s", error.line())
            self.machines.feed_round(TrainingRefused(action.round, error.line(), self.context.now()))
            return
        self.uses = done.uses
        self._tempo = step_budget.measured(self._tempo, done.train_s, done.pending.steps, done.pending.tokens)
        tells_loss = 0 <= done.pending.loss < LOSS_END and not self.context.spec.privacy
        self.loss = done.pending.loss if tells_loss else 0.0
        self.context.log.trained(done, request.ahead)
        self.moments.offer(done.parted)
        left_out = max(0, self._tempo.chosen - request.steps)
        self.machines.feed_round(trained_of(done, action.after, self.context.now(), left_out))
        number = done.pending.round
        await self.worker.ask_until_saved(worker_messages.SaveRequest(number), worker_messages.SaveReply)
        self.context.log.saved(number)
        self.machines.feed_round(TrainingSaved(done.pending, self.context.now()))

    def recover(self, started: worker_messages.StartReply) -> None:
        """Report how often the data were used, what is lost, and a change of chain."""
        self.uses, here = started.uses, {pending.round for pending in started.pending}
        self.lost = frozenset(self.contributions.own_rounds(started.final)) - here
        self.context.log.chain_changed(started, self.contributions.own_rounds(started.settled))

    def payloads_again(self, on_back: Callable[[Digest], None]) -> PayloadsAgain:
        """How payloads of rounds that are open again get back into the blob store, which dropped them."""
        return PayloadsAgain(
            shelf=self.net,
            on_disk_fault=self.guard.on_disk_fault,
            is_open=lambda one: self.contributions.is_ours(one.round) and one.round > self.applied(),
            is_whole=self._is_whole,
            on_back=on_back,
        )

    def announce(self, pending: worker_messages.Pending) -> None:
        """Publish the contribution of a trained round, once."""
        if self.contributions.is_ours(pending.round) or not self._add_blob(pending):
            return
        told, planned = not self.context.spec.privacy, self.is_reduced(pending.round)
        record = contribution_of(pending, self.verdicts(), tells_loss=told, is_planned=planned)
        entry = self.guard.publish(record)
        if entry is not None:  # its echo may come after the next look
            self.contributions.add(entry.id, self.context.me, record)

    def _add_blob(self, pending: worker_messages.Pending) -> bool:
        """Put a payload into the blob store; whether it is there, as it was."""
        try:
            return self._is_whole(pending, self.net.add_blob(Path(pending.path), is_synced=True))
        except DiskFault as error:
            self.guard.on_disk_fault(error)
            return False

    def _is_whole(self, pending: worker_messages.Pending, blob: Digest) -> bool:
        if blob != pending.payload:  # the disk changed it; the round's final set will be without it
            self.context.log.event("payload_damaged", round=pending.round, path=pending.path)
        return blob == pending.payload

    def _request(self, action: StartTraining) -> worker_messages.TrainRequest:
        """Choose steps and experts of the round that begins."""
        self.progress = None
        nominal = self.context.spec.steps(action.round)
        self.starts = self.starts.after(action.round, self.context.now(), nominal)
        self.context.log.training_started(action.round)
        state = self.machines.round
        speeds = [view.tokens_per_s for view in members_at_work(state).values()]
        self._tempo = step_budget.choose(self._tempo, nominal, speeds)
        before = self.assignment.experts
        experts, low = self.assignment.assign(holders_at_work(state)), step_budget.least(self._tempo, nominal)
        self.moments.on_assigned(before, experts)
        return worker_messages.TrainRequest(
            round=action.round,
            slot=action.slot,
            slots=action.slots,
            steps=step_budget.shortened(self._tempo, nominal, speeds, action.late_s),
            after=action.after,
            experts=experts,
            said=self.contributions.own_rounds(self.applied()),
            ahead=self.machines.round.ahead.chosen,
            sequences=self._tempo.sequences if self._tempo.batch > 1 else 0,
            limit_s=step_budget.limit_s(self._tempo, nominal, speeds),
            least_steps=low.steps,
            least_sequences=low.sequences,
        )

    async def _prepare(self, action: StartTraining) -> None:
        """Get the files that the round needs with the experts that this node has now."""
        life, turn = self.worker.lives, Turn(action.round, self.context.me, action.slot, action.slots)

        def report(reason: str) -> None:
            self.waiting = reason

        if await self.assets.prepare(turn, self.assignment.trained or (), report):
            self.worker.check_life(life)
            self._check_need(action.round)

    def _check_need(self, number: Round) -> None:
        """Raise Superseded if the round machine does not train this round any more."""
        state = self.machines.round
        if (state.phase, state.round) != (Phase.TRAIN, number):
            raise Superseded(f"round {number} is not trained any more")
