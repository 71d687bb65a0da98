"""Performs what the round machine and the finality machine decide.

Everything that happens (an entry, a lease, a reply of the worker, a tick) becomes an event of one queue; the event
feeds the machines, and their actions are performed at once. Long actions run as tasks of the queue and end as
events. All state that matters is in the machines, the ledger and the worker's files.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from atoll.node.daemon.certificates.chosen_path import chosen_path
from atoll.node.daemon.certificates.history import LedgerHistory
from atoll.node.daemon.certificates.reducers import ReducerHistory
from atoll.node.daemon.certificates.started_state import first_of_epochs
from atoll.node.daemon.consensus import types as finality_types
from atoll.node.daemon.consensus.chains.chain_exit import ChainExit
from atoll.node.daemon.consensus.orphans import ORPHAN_BODIES
from atoll.node.daemon.consensus.proposer import patience_of
from atoll.node.daemon.coordinator.contribution_sets import ContributionIndex, ContributionSets
from atoll.node.daemon.coordinator.evaluation import Evaluator
from atoll.node.daemon.coordinator.finalizer import Finalizer
from atoll.node.daemon.coordinator.leases import MemberLeases
from atoll.node.daemon.coordinator.local_training import LocalTraining
from atoll.node.daemon.coordinator.moment_transfer import MomentTransfer
from atoll.node.daemon.coordinator.newcomers import NewcomerWatch
from atoll.node.daemon.core.interfaces import Network, NodeView, RoundReducer, RunContext
from atoll.node.daemon.core.runtime import EventQueue, FaultGuard, Machines, WorkerClient
from atoll.node.daemon.experts.expert_assignment import ExpertAssignment
from atoll.node.daemon.member_standing import MemberStandings
from atoll.node.daemon.removal.removals import Removals
from atoll.node.daemon.removal.requests import votes_against
from atoll.node.daemon.rounds import types as round_types
from atoll.node.daemon.rounds.participants import lost_of
from atoll.node.daemon.rounds.queries import next_tick_s, reason
from atoll.node.daemon.rounds.state import Phase, RoundState
from atoll.node.daemon.standing_still.absent_members import lost_work, missing, no_model
from atoll.node.daemon.standing_still.stillness import Stillness, frozen, hangs, is_late, marks_of, watch
from atoll.protocols.errors import DiskFault, Divergence, LocalFault
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.coverage import largest_payload
from atoll.protocols.ledger.entry_rules import is_lawful
from atoll.protocols.ledger.records import Ack, Contribution, Entry, Follow, Leave
from atoll.protocols.local import worker_messages

TICK_S = 0.25


@dataclass(kw_only=True, slots=True)
class Driver:
    """One node's part in one run, made by `build_driver`. Implements `SwarmListener`, `NodeControl`: see there."""

    context: RunContext
    net: Network
    queue: EventQueue
    machines: Machines
    guard: FaultGuard
    worker: WorkerClient
    contributions: ContributionIndex
    sets: ContributionSets
    reducer: RoundReducer
    finalizer: Finalizer
    assignment: ExpertAssignment
    moments: MomentTransfer
    leases: MemberLeases
    training: LocalTraining
    evaluator: Evaluator
    on_set: Callable[[Round, tuple[Digest, ...], frozenset[PeerId] | None], None]
    """The view has this set of a round (None), or it is final and these decide the next: weights may follow."""
    newcomers: NewcomerWatch
    removals: Removals
    standings: MemberStandings
    history: LedgerHistory | None = None
    """What stands for the records of old rounds that the ledger lacks; None: it lacks none, and never will."""
    chain_exit: ChainExit
    is_finished: bool = False  # all rounds of the run are final
    still: Stillness = field(default_factory=Stillness)
    """For how long nothing moved."""

    def __post_init__(self) -> None:
        self.machines.perform_round, self.machines.perform_finality = self._perform_round, self._perform_finality
        self.finalizer.leave_unmarked = self._leave_unmarked

    async def serve(self, on_up: Callable[[], None] = lambda: None) -> None:
        """Run until cancelled. `on_up` is called once the ledger's entries are replayed."""

        def begin() -> None:
            self._drop_old_snapshots()
            self.newcomers.begin()
            self._replay()
            self.moments.drop_old(self.contributions.payloads())
            self.queue.start_task(self._ticks(), "ticks")
            on_up()

        await self.queue.serve(begin)

    async def _ticks(self) -> None:
        while True:
            self.queue.post(self._tick)
            await asyncio.sleep(next_tick_s(self.round, self.context.now(), TICK_S))

    def _tick(self) -> None:
        now = self.context.now()
        self.leases.refresh()
        if (refusal := self.net.refusal()) != self.round.refused:
            self.context.log.event("refused", reason=refusal)
            self.machines.feed_round(round_types.Refused(refusal, now))
        self.machines.feed_round(round_types.RoundTick(now))
        members, lease_s = self.leases.members, self.context.spec.pace.lease_s
        self.machines.finality = replace(self.finality, patience_s=patience_of(self.round.train_s, lease_s))
        self.machines.feed_finality(finality_types.MembersSeen(frozenset(members), lost_of(members)))
        if (equivocators := self.net.equivocators()) != self.finality.equivocators:
            self.machines.feed_finality(finality_types.EquivocatorsSeen(equivocators))
        self.machines.feed_finality(finality_types.FinalityTick(now))
        self.reducer.step()
        self.finalizer.step()
        self.moments.step()
        self.removals.step()
        self.newcomers.step()
        self.evaluator.step()
        worker, pace_s = self.worker, self.training.starts.round_s
        is_stuck = hangs(self.still, self.round, pace_s, asked=worker.asked > 0, stepped=worker.has_stepped)
        self.leases.publish_if_due(can_vote=not (is_stuck or self.guard.refused))
        self._cut_ledger()
        marks = marks_of(
            self.round,
            self.training.progress.step if self.training.progress else 0,
            self.finalizer.applied,
            self.net.bytes_moved(),
            fetches=bool(self.training.waiting),
            works=self.worker.asked > 0,
            starts=self.worker.starting,
        )
        self.still = watch(self.still, marks, now)

    def _cut_ledger(self) -> None:
        try:
            if self.history is not None and self.history.cut(self.finality, self.finalizer.applied):
                self.context.log.event("ledger_cut", round=self.history.last_gone)
        except DiskFault as error:
            self.guard.on_disk_fault(error)

    def _replay(self) -> None:
        """Feed finality first: the round machine needs no contributions to rounds that the ledger proves final."""
        spec, me = self.context.spec, self.context.me
        entries = [entry for entry in self.net.entries() if is_lawful(spec, entry)]
        orphans = [entry for entry in self.net.orphans() if is_lawful(spec, entry)]
        signed = ((entry.author, entry.body) for entry in orphans)
        chosen = chosen_path(((entry.author, entry.body) for entry in entries), me, signed)
        begun = replace(self.finality, planned=chosen, now=self.context.now())
        if self.history is not None:
            begun = self.history.begin(begun, chosen)
            self.reducer.resume(self.history.reducers)
            if self.history.authors:
                self.net.accept(self.history.authors, by_work=False)
                self.net.accept(begun.voters)  # the authors of the newest set that the summary stands for
        self.machines.finality = begun
        for entry in entries:
            self._feed_entry_to_finality(entry)
        self._feed_orphans(orphans)
        self.removals.step()  # before a set is made of excluded work
        for entry in entries:
            if entry.body.round > self.finality.last_final:
                self._feed_entry_to_round(entry)

    def _drop_old_snapshots(self) -> None:
        """Delete all blobs larger than a payload: a new snapshot is taken as soon as the worker is there."""
        for blob in set(self.net.blobs_above(largest_payload(self.context.spec))).difference(self.context.kept):
            self.guard.delete_blob(blob)

    # --- state ------------------------------------------------------------------------------------

    @property
    def round(self) -> RoundState:
        """The state of the round machine: what this node trains, folds or waits for."""
        return self.machines.round

    @property
    def finality(self) -> finality_types.FinalityState:
        """The state of the finality machine: which sets are final, and who votes on the next."""
        return self.machines.finality

    def has_begun(self) -> bool:
        """Return whether the ledger knows a contribution to the run."""
        return self.finality.last_final >= 0 or bool(self.round.books)

    async def wait_idle(self) -> None:
        """Return when no round of this node is under way."""
        await self.machines.idle.wait()

    def view(self) -> NodeView:
        state, finality, leases, still = self.round, self.finality, self.net.leases, self.still
        pace_s, progress, applied = self.training.starts.expected_s, self.training.progress, self.finalizer.applied
        waiting = self.training.waiting or no_model(state, finality.last_final, applied, leases, still)
        late, held = is_late(still, state, pace_s), self.contributions.is_held
        stuck = lost_work(finality, self.training.lost, self.leases.members, held, is_late=late)
        gone, why = missing(finality, leases), waiting or reason(state, progress)
        return NodeView(
            round=state,
            applied=applied,
            experts=self.assignment.trained,
            progress=progress,
            waiting=waiting,
            trouble=self.removals.trouble or self.guard.trouble or stuck,
            excluded=self.removals.shown(),
            votes_against=votes_against(finality),
            missing=gone,
            frozen=frozen(still, state, pace_s, missing=gone or stuck, why=why),
            still_s=still.still_s,
            validated=self.evaluator.validated,
            standings=self.standings,
            left=self.leases.left_at.keys(),
            is_worker_ready=self.worker.is_ready,
            uses=self.training.uses,
            records_from=self.history.last_gone + 1 if self.history is not None else 0,
        )

    async def evaluate(self) -> worker_messages.EvaluateReply:
        return await self.worker.ask(worker_messages.EvaluateRequest(), worker_messages.EvaluateReply)

    def pause(self, reason: str, for_s: float | None = None) -> None:
        self.queue.post(lambda: self.machines.feed_round(round_types.Pause(reason, self.context.now(), for_s)))

    def hold(self, reason: str) -> None:
        """Rest as in a pause while `reason` is not empty, whatever the user's own pause."""
        self.context.log.event("held", reason=reason)
        self.queue.post(lambda: self.machines.feed_round(round_types.Hold(reason, self.context.now())))

    def resume(self) -> None:
        self.removals.check_resume()
        self.queue.post(lambda: self.machines.feed_round(round_types.Resume(self.context.now())))

    def exclude(self, peer: PeerId, first: Round | None, reason: str, since: Round | None = None) -> str:
        return self.removals.exclude(peer, first, reason, since)

    def leave(self) -> bool:
        """Write into the feed that this node leaves, if it ever contributed. Returns whether others are to know.

        They are not where nobody is there, or where the feed takes no entry.
        """
        # Before the feed was compared with what the others have, an entry could be its second one of that number.
        if not self.leases.members or not self.finalizer.is_synced:
            return False
        newest = self.contributions.newest_own()
        try:
            return newest is None or self.guard.publish(Leave(newest)) is not None
        except LocalFault:
            return False  # a feed with two histories takes no entry: the node ends because of it, and has said so

    def on_behind(self, reason: str) -> None:
        self.queue.post(lambda: self.machines.feed_round(round_types.Behind(reason, self.context.now())))

    def on_alone(self, after_s: float) -> None:
        self.context.log.event("alone", after_s=after_s)

    def on_entry(self, entry: Entry) -> None:
        self.queue.post(lambda: self._feed_entry(entry))

    def on_pruned(self, author: PeerId) -> None:
        self.queue.post(lambda: self.newcomers.on_pruned(author))
        self.queue.post(lambda: self.removals.on_pruned(author))

    def on_orphans(self, entries: tuple[Entry, ...]) -> None:
        self.queue.post(lambda: self._feed_orphans(entries))

    def on_leases(self) -> None:
        """A register changed, perhaps a lease. Changes shortly after another one wait for the tick."""
        if self.context.now() - self.leases.read_at >= TICK_S:
            self.queue.post(self.leases.refresh)

    def on_synced(self) -> None:
        self.queue.post(self._begin_voting)

    def _begin_voting(self) -> None:
        self.guard.does(self.net.end_replay)  # a disk that refuses keeps newcomers without a place until later
        self.finalizer.is_synced = True
        self.leases.refresh()  # a round may begin at once: whether it comes too late for one is in the leases
        worked = self.contributions.newest_own()
        down_s = self.net.down_s(2 * self.context.spec.pace.lease_s)
        self.machines.feed_finality(finality_types.ReplayDone(down_s, -1 if worked is None else worked))
        self.finalizer.step()
        if not self.finalizer.has_model:
            self.leave()  # it trained before, and can fold for no vote: nobody need wait for it

    async def on_started(self, started: worker_messages.StartReply) -> None:
        """A fresh worker is there, with what it found on disk."""
        self.queue.post(lambda: self._begin_life(started))

    def _begin_life(self, started: worker_messages.StartReply) -> None:
        self.leases.refresh()
        self.assignment.publish(started.experts)
        self.worker.on_started()
        self.training.recover(started)
        self.finalizer.on_worker_started(started)
        again = self.training.payloads_again(lambda one: self.queue.post(partial(self.on_payload_resolved, one)))
        self.queue.start_task(again.put_back(started.pending), "payloads again")

    def on_worker_gone(self, why: str) -> None:
        """The worker died; the round waits for the next one, which may hold older rounds."""
        self.worker.on_gone()
        self.queue.post(lambda: self._end_life(why))

    def _end_life(self, why: str) -> None:
        if self.round.ready:
            self.machines.feed_round(round_types.Behind(f"{why}; it is being started again", self.context.now()))

    def on_progress(self, progress: worker_messages.TrainProgress) -> None:
        """The worker made an inner step of the round in training."""
        self.training.progress, self.worker.has_stepped = progress, True
        self.training.uses = progress.uses

    def on_payload_resolved(self, payload: Digest) -> None:
        """Feed every contribution that names this payload and can be folded with it."""
        line = self.newcomers.on_held(payload)
        for number, entry in self.contributions.held_with(payload):
            self.machines.feed_round(round_types.PayloadHeld(entry, number, self.context.now(), line))
            self.machines.feed_finality(finality_types.EntryPayloadHeld(entry))

    def _feed_entry(self, entry: Entry) -> None:
        if is_lawful(self.context.spec, entry):
            self._feed_entry_to_finality(entry)
            self._feed_entry_to_round(entry)
            self.leases.on_entry(entry.author, is_leave=isinstance(entry.body, Leave))

    def _feed_orphans(self, entries: Iterable[Entry]) -> None:
        """They belong to no view of a round: the round machine never sees them, and nobody reduces them."""
        for entry in entries:
            if isinstance(entry.body, ORPHAN_BODIES) and is_lawful(self.context.spec, entry):
                self._feed_entry_to_finality(entry, is_orphan=True)

    def _feed_entry_to_finality(self, entry: Entry, *, is_orphan: bool = False) -> None:
        body, name = entry.body, entry.id
        if isinstance(body, Contribution):
            self.contributions.add(name, entry.author, body)
        self.reducer.add_entry(entry, is_orphan=is_orphan)
        self.newcomers.on_entry(entry)
        self.machines.feed_finality(finality_types.EntrySeen(name, entry.author, body, is_orphan))
        if not is_orphan:
            self.removals.on_entry(entry)
        if isinstance(body, Contribution) and (
            self.contributions.is_held(name) or self.reducer.is_reduced(body.round)
        ):
            self.machines.feed_finality(finality_types.EntryPayloadHeld(name))

    def _feed_entry_to_round(self, entry: Entry) -> None:
        if isinstance(entry.body, Contribution):
            held, now = self.contributions.is_held(entry.id), self.context.now()
            self.machines.feed_round(round_types.ContributionSeen(entry.id, entry.author, entry.body, held, now))

    # --- actions ----------------------------------------------------------------------------------

    def _perform_round(self, action: round_types.Action) -> None:
        match action:
            case round_types.StartTraining():
                self.queue.start_task(self.training.train(action), f"train {action.round}")
            case round_types.Announce(pending):
                self.training.announce(pending)
            case round_types.Discard(pending):
                if not self.contributions.is_ours(pending.round):
                    self.context.log.event("discarded", round=pending.round)
            case round_types.FetchPayload(entry):
                self.sets.fetch_payloads((entry,))
            case round_types.FoldRound(number, names):
                self.queue.start_task(self._fold(number, names), f"fold {number}")
            case round_types.ResolveSet(number):
                self.reducer.close_round(number)
            case round_types.PublishAck():
                self._acknowledge(action)
            case round_types.LeaveRound(number, names):
                self.machines.feed_finality(finality_types.RoundClosed(number, names))
            case round_types.PublishLease(activity, number):
                self.leases.announce(activity, number)
                # Who waits for the next round closes this one, too: its view of the set still grows.
                idle = activity != "training" and self.round.phase is not Phase.JOIN
                self.machines.feed_finality(finality_types.Idle(idle, self.context.now()))
            case round_types.Finish():
                if not self.is_finished:
                    self.context.log.event("finished", rounds=self.context.spec.outer.rounds)
                self.is_finished = True

    def _perform_finality(self, action: finality_types.Action) -> None:
        log = self.context.log
        match action:
            case finality_types.Append(body):
                if self.net.must_compare():
                    is_written = False  # the others may have gone on without it
                # Also where it is an epoch of ours: after the entry, the state is of another chain.
                elif isinstance(body, Follow) and body.epoch != self.finality.epoch:
                    is_written = self.chain_exit.leave(body.round, body)
                else:
                    is_written = self.guard.publish(body) is not None
                if not is_written:
                    self.queue.post(lambda: self.machines.feed_finality(finality_types.AppendRefused()))
            case finality_types.CheckRound():
                self.queue.start_task(self._check(action), f"check {action.round}")
            case finality_types.FetchMissing(number, entries, payloads, proposer):
                if entries:
                    self.net.require(entries, proposer)
                self._fetch_for_check(number, payloads)
            case finality_types.FetchOrphans(number, wanted, proposals):
                self.net.fetch_orphans(number, wanted, proposals)
            case finality_types.FinalizeRound():
                self.newcomers.on_final(action.contributions)
                self._note_final(action)
                self.reducer.set_final(action.round, action.contributions)
                self.on_set(action.round, action.contributions, action.deciders)
                self.finalizer.add(action)
            case finality_types.EnterEpoch(_, first, voters):
                self.net.accept(voters, by_work=False)
                log.event("epoch", round=first, members=list(voters))
            case finality_types.SwitchEpoch(_, first):
                self.chain_exit.leave(first)
            case finality_types.Summarize(state):
                self._summarize(state)
            case finality_types.ReportOtherSummary(number, _, proposer, ours, theirs):
                log.event("other_summary", round=number, peer=proposer, ours=ours.hex(), theirs=theirs.hex())
            case finality_types.ReportDivergence(number, _, proposer, ours, theirs):
                log.event("divergence", round=number, peer=proposer, ours=ours.hex(), theirs=theirs.hex())
            case finality_types.ReportNarrow(number, _, proposer, named, ours):
                log.event("narrow_set", round=number, peer=proposer, named=named, ours=ours)
            case finality_types.ReportEquivocation(number, author, entry, reason):
                log.event("equivocation", round=number, peer=author, entry=entry.hex(), reason=reason)

    def _note_final(self, action: finality_types.FinalizeRound) -> None:
        if self.history is not None:
            named = self.contributions.find(action.contributions)
            self.history.on_counted((author, entry) for entry, author, _ in named)
            # Several rounds may become final at once: the state is that after the newest.
            if action.round == self.finality.last_final:
                self.history.on_final(self.finality)

    def _summarize(self, state: finality_types.FinalityState) -> None:
        """Make the summary that voters are about to certify, and tell finality its name."""
        reducers = self.reducer.history() if self.context.spec.reduce else ReducerHistory()
        try:
            made = self.history.certify(state, reducers) if self.history is not None else None
        except DiskFault as error:
            self.guard.on_disk_fault(error)
            return
        if made is not None:
            event = finality_types.SummaryMade(state.last_final, made)
            self.queue.post(partial(self.machines.feed_finality, event))

    def _leave_unmarked(self, number: Round, state: Digest) -> bool:
        """Leave the chain that has this state of the round, if it is another one. Raises LocalFault."""
        # Its disk refused the mark until it ended. A fold that went wrong gives a state that nobody proposed.
        first = first_of_epochs(self.finality.chain, self.finality.epochs)
        is_proposed = self.history is not None and self.history.is_proposed(number, state)
        return is_proposed and self.chain_exit.leave_unmarked(first, number)

    def _fetch_for_check(self, number: Round, entries: tuple[Digest, ...]) -> None:
        """Fetch what a check needs. The check of a reduced round fetches its slices itself."""
        if not (is_reduced := self.reducer.is_reduced(number)):
            self.sets.fetch_payloads(entries)
        for entry in entries:
            if is_reduced or self.contributions.is_held(entry):  # fetched by nobody, so nobody tells of it
                self.queue.post(partial(self.machines.feed_finality, finality_types.EntryPayloadHeld(entry)))

    async def _fold(self, number: Round, names: tuple[Digest, ...]) -> None:
        request_of = partial(worker_messages.FoldRequest, number)
        folded = await self.sets.ask(number, names, request_of, worker_messages.FoldReply)
        self.machines.feed_round(round_types.FoldDone(number, folded.state, self.context.now()))

    async def _check(self, action: finality_types.CheckRound) -> None:
        number, names = action.round, action.contributions
        while not self.sets.are_correctable(action.corrections, number):
            if self.finalizer.applied >= number:
                return  # a quorum had the payloads
            await asyncio.sleep(TICK_S)
        request_of, kind = partial(worker_messages.CheckRequest, number), worker_messages.CheckReply
        try:
            checked = await self.sets.ask(number, names, request_of, kind, action.corrections)
        except Divergence as error:
            if not action.excised:
                raise
            self.removals.on_overflow(action.excised, error)
            return
        self.machines.feed_finality(finality_types.CheckDone(number, names, checked.state, action.excised))

    def _acknowledge(self, action: round_types.PublishAck) -> None:
        """A round closed here: log it, publish the view's digest, tell finality, validate if due."""
        authors = self.contributions.authors(action.members)
        self.context.log.closed(action.round, action.set_digest, action.state, authors, self.net.bytes_moved())
        self.guard.publish(Ack(action.round, action.set_digest, action.state))
        self.on_set(action.round, action.members, None)
        self.machines.feed_finality(finality_types.RoundClosed(action.round, action.members))
        self.evaluator.on_closed(action.round, action.state)
