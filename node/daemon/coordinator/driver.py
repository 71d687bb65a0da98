"""Performs what the round machine and the finality machine decide.

Everything that happens (an entry, a lease, an answer of the worker, a tick) becomes an event in one
inbox; `_drain` feeds it to the machines and performs their actions. Long actions run as tasks of one
group and end as events. All state that matters is in the machines, the ledger and the worker's files.
"""

import asyncio
import dataclasses
import logging
import random
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from atoll.node.daemon.consensus import machine as finality
from atoll.node.daemon.consensus import types as finality_types
from atoll.node.daemon.consensus.types import (
    Append,
    CheckDone,
    CheckRound,
    EntryPayloadHeld,
    EntrySeen,
    FetchMissing,
    FinalApplied,
    FinalityTick,
    FinalizeRound,
    Idle,
    Live,
    NotAppended,
    ReportDivergence,
    ReportEquivocation,
    ReportNarrow,
    RoundClosed,
)
from atoll.node.daemon.coordinator.contribution_index import contribution_of, is_lawful
from atoll.node.daemon.coordinator.contribution_sets import Sets
from atoll.node.daemon.coordinator.evaluation import Evaluations
from atoll.node.daemon.coordinator.expert_assignment import ExpertShare
from atoll.node.daemon.coordinator.finalizer import Finals
from atoll.node.daemon.coordinator.interfaces import Network, round_half_s
from atoll.node.daemon.coordinator.moment_transfer import Handover
from atoll.node.daemon.coordinator.run_moments import bring_moments
from atoll.node.daemon.reduction.coordinator import Reductions
from atoll.node.daemon.rounds import machine as round_machine
from atoll.node.daemon.rounds import types as round_types
from atoll.node.daemon.rounds.participants import MemberView
from atoll.node.daemon.rounds.state import Phase, config_of
from atoll.node.daemon.rounds.step_budget import Tempo, choose, measured
from atoll.node.daemon.rounds.types import (
    Announce,
    Behind,
    ContributionSeen,
    Discard,
    FetchPayload,
    Finish,
    FoldDone,
    FoldRound,
    LeasesChanged,
    Pause,
    PublishAck,
    PublishLease,
    Resume,
    RoundFinal,
    RoundTick,
    Settle,
    StartTraining,
    TrainingSaved,
    WorkerReady,
    trained_of,
)
from atoll.node.daemon.telemetry.round_log import RoundLog
from atoll.node.ipc.worker_process import Trainer, WorkerDied, unless_needless
from atoll.protocols.errors import AtollError, DiskFault, PeerFault, Superseded
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.coverage import largest_payload
from atoll.protocols.ledger.records import Ack, Body, Contribution, Entry, set_digest
from atoll.protocols.ledger.registers import Activity, Lease
from atoll.protocols.local.worker_messages import (
    Ask,
    CheckReply,
    CheckRequest,
    FoldReply,
    FoldRequest,
    Pending,
    SaveReply,
    SaveRequest,
    StartReply,
    TrainProgress,
    TrainReply,
    TrainRequest,
)
from atoll.protocols.run.moments import files_for
from atoll.protocols.run.run_spec import RunSpec

A = TypeVar("A")
log = logging.getLogger(__name__)

TICK_S = 0.25
PATIENCE_ROUNDS = 2.0
MIN_PATIENCE_S = 3.0
DISK_RETRY_S = 2.0
"""Rest before work that the disk refused is tried again."""


class Driver:
    """One node's part in one run."""

    def __init__(
        self,
        spec: RunSpec,
        me: PeerId,
        net: Network,
        log: RoundLog,
        spool: Path,
        now: Callable[[], float],
        *,
        eval_every: int = 0,
        room: int | None = None,
        luck: random.Random | None = None,
    ) -> None:
        """`room`: experts of each layer that this node may train, where members train some only; None: any number.

        `luck`: decides what is checked of others; by default nobody can foresee it.
        """
        self.spec, self.me, self.log, self._spool = spec, me, log, spool
        self._net, self.now = net, now
        self._evaluations = Evaluations(self, eval_every)
        self.trainer: Trainer | None = None
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._group: asyncio.TaskGroup | None = None
        self.round = round_machine.begin(config_of(spec, me))
        self.share = ExpertShare(spec, me, net, room)
        self.tempo = Tempo(spec.inner.batch * spec.model.context, spec.pace.least_256, spec.pace.most_256)
        self.finality = finality.begin(spec.id, me, spec.outer.rounds, spec.owner)
        self.finals = Finals(self, net, spool)
        self.handover = Handover(self, net)
        self.sets = Sets(self, net)
        self.contributions = self.sets.contributions
        self.reductions: Reductions | None = None
        if spec.reduce:
            self.reductions = Reductions(self, net, self.sets.payloads, spool, luck or random.SystemRandom())
        self._lease: tuple[Activity, Round] = ("syncing", Round(0))
        self._members: dict[PeerId, MemberView] = {}
        self._lease_at = self._members_at = -1e9
        self._pending: tuple[Pending, ...] = ()
        self.synced = self.worker_ready = False
        self.lives = 0
        """Workers that ended: what was asked of one of them is not asked of the next."""
        self.progress: TrainProgress | None = None
        self.trouble = ""
        self.waiting = ""
        """What a round that has begun waits for before its first step."""
        self.finished = False

    # --- running ------------------------------------------------------------------------------

    async def serve(self, ready: Callable[[], None] = lambda: None) -> None:
        """Run until cancelled; `ready` is called when the ledger is replayed."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            self._drop_old_snapshots()
            self._replay()
            self.handover.drop_old()
            group.create_task(self._ticks(), name="ticks")
            ready()
            while True:
                self._wake.clear()
                self._drain()
                await self._wake.wait()

    def post(self, happen: Callable[[], None]) -> None:
        """Let `happen` run in the driver's own turn. Safe from any callback of the loop."""
        self._inbox.append(happen)
        self._wake.set()

    def _drain(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    @property
    def group(self) -> asyncio.TaskGroup:
        """Owns everything that the driver starts."""
        assert self._group is not None
        return self._group

    def start_task(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run `work` under the driver; a death of the worker inside it is no error: Ready comes again."""
        self.group.create_task(unless_needless(work), name=name)

    async def _ticks(self) -> None:
        while True:
            self.post(self._tick)
            await asyncio.sleep(TICK_S)

    def _tick(self) -> None:
        now = self.now()
        self._refresh_members()
        self.feed_round(RoundTick(now))
        self._set_patience()
        self.feed_finality(FinalityTick(now))
        if self.reductions is not None:
            self.reductions.step()
        self.finals.step()
        self.handover.step()
        if now - self._lease_at > self.spec.pace.lease_s / 3:
            self._put_lease()

    def _set_patience(self) -> None:
        patience_s = max(MIN_PATIENCE_S, PATIENCE_ROUNDS * self.round.train_s)
        self.finality = dataclasses.replace(self.finality, patience_s=patience_s)

    # --- what happens outside -----------------------------------------------------------------

    def _replay(self) -> None:
        """Finality first: the round machine need not hear of rounds that the ledger proves final."""
        entries = [entry for entry in self._net.entries() if is_lawful(self.spec, entry)]
        for entry in entries:
            self._note(entry)
        for entry in entries:
            if entry.body.round > self.finality.last_final:
                self._tell_round(entry)

    def _drop_old_snapshots(self) -> None:
        """Whatever is larger than a payload: a new one is taken as soon as the worker is there."""
        for blob in set(self._net.blobs_above(largest_payload(self.spec))).difference(self.spec.given):
            self.delete_blob(blob)

    def on_entry(self, entry: Entry) -> None:
        """The ledger took an entry (ours included)."""
        self.post(lambda: self.entry_seen(entry))

    def entry_seen(self, entry: Entry) -> None:
        """Feed one entry to both machines."""
        if is_lawful(self.spec, entry):
            self._note(entry)
            self._tell_round(entry)

    def _note(self, entry: Entry) -> None:
        body, name = entry.body, entry.id
        if isinstance(body, Contribution):
            self.contributions.note(name, entry.author, body)
        if self.reductions is not None:
            self.reductions.note(entry)
        self.feed_finality(EntrySeen(name, entry.author, body))
        if isinstance(body, Contribution) and (self.contributions.held(name) or self._is_sliced(body.round)):
            self.feed_finality(EntryPayloadHeld(name))

    def _is_sliced(self, number: int) -> bool:
        """Whether nobody reads the round's payloads as a whole."""
        return self.reductions is not None and bool(self.reductions.sets.plan(number).reducers)

    def _tell_round(self, entry: Entry) -> None:
        body = entry.body
        if isinstance(body, Contribution):
            held = self.contributions.held(entry.id)
            self.feed_round(ContributionSeen(entry.id, entry.author, body, held, self.now()))

    def on_leases(self) -> None:
        """Something changed, a lease perhaps. What comes shortly after another change waits for the tick."""
        if self.now() - self._members_at >= TICK_S:
            self.post(self._refresh_members)

    def _refresh_members(self) -> None:
        self._members_at = self.now()
        born = self._members_at - self.spec.pace.lease_s
        members = {
            peer: MemberView(lease.activity, lease.round, round_half_s(born + left_s), lease.tokens_per_s)
            for peer, (lease, left_s) in self._net.leases().items()
        }
        short = self.share.shortage(members)
        if members != self._members or short != self.round.shortage:
            self._members = members
            self.feed_round(LeasesChanged(members, self.now(), short))

    def on_synced(self) -> None:
        """The ledger was compared with at least one peer's, or there is nobody to ask."""
        self.post(self._mark_synced)

    def _mark_synced(self) -> None:
        self.synced = True
        self.feed_finality(Live())
        self.finals.step()

    async def on_started(self, started: StartReply) -> None:
        """A fresh worker tells what it found on disk."""
        self.post(lambda: self._begin_life(started))

    def _begin_life(self, started: StartReply) -> None:
        self._pending = started.pending
        self.share.say(started.experts)
        self.worker_ready = True
        self.finals.worker_started(started)

    def on_worker_gone(self) -> None:
        """The worker died; asks fail until on_started, and the round waits: a fresh one may hold older rounds."""
        self.worker_ready = False
        self.lives += 1
        self.post(self._end_life)

    def _end_life(self) -> None:
        if self.round.ready:
            self.feed_round(Behind("the worker died and is being started again", self.now()))

    def on_progress(self, progress: TrainProgress) -> None:
        """An inner step was made."""
        self.progress = progress

    def ready(self, applied: Round) -> None:
        """Θ_final(applied) is in the worker and nothing newer can be applied now: go on training."""
        pending, self._pending = self._pending, ()
        self.feed_round(WorkerReady(applied, pending, self.now()))

    def pause(self, reason: str) -> None:
        """Finish the round at hand and rest."""
        self.post(lambda: self.feed_round(Pause(reason, self.now())))

    def resume(self) -> None:
        """Go on after a pause."""
        self.post(lambda: self.feed_round(Resume(self.now())))

    def has_begun(self) -> bool:
        """Whether the ledger knows a contribution to the run."""
        return self.finality.last_final >= 0 or bool(self.round.books)

    async def wait_idle(self) -> None:
        """Return when no round of this node is under way."""
        await self._idle.wait()

    def blame(self, peer: PeerId, error: AtollError) -> None:
        """A peer broke the protocol."""
        self._net.blame(peer, error)
        if isinstance(error, PeerFault):
            self.log.event("peer_fault", peer=peer, fault=error.line())

    # --- the machines ---------------------------------------------------------------------------

    def feed_round(self, event: round_types.Event) -> None:
        """Step the round machine and perform its actions."""
        self.round, actions = round_machine.step(self.round, event)
        if self.round.phase in (Phase.TRAIN, Phase.COLLECT, Phase.FOLD):
            self._idle.clear()
        else:
            self._idle.set()
        for action in actions:
            self._do_round(action)

    def feed_finality(self, event: finality_types.Event) -> None:
        """Step the finality machine and perform its actions."""
        self.finality, actions = finality.step(self.finality, event)
        for action in actions:
            self._do_finality(action)

    def _do_round(self, action: round_types.Action) -> None:
        match action:
            case StartTraining():
                self.start_task(self._train(action), f"train {action.round}")
            case Announce(pending):
                self._announce(pending)
            case Discard(pending):
                if not self.contributions.is_ours(pending.round):
                    self.log.event("discarded", round=pending.round)
            case FetchPayload(entry):
                self.sets.want_payloads((entry,))
            case FoldRound(number, names):
                self.start_task(self._fold(number, names), f"fold {number}")
            case Settle(number):
                assert self.reductions is not None
                self.reductions.settle(number)
            case PublishAck():
                self._closed(action)
            case PublishLease(activity, number):
                self._lease = (activity, number)
                self._put_lease()
                self.feed_finality(Idle(activity != "training", self.now()))
            case Finish():
                if not self.finished:
                    self.log.event("finished", rounds=self.spec.outer.rounds)
                self.finished = True

    def _do_finality(self, action: finality_types.Action) -> None:
        match action:
            case Append(body):
                if self.publish(body) is None:
                    self.post(lambda: self.feed_finality(NotAppended()))
            case CheckRound():
                self.start_task(self._check(action), f"check {action.round}")
            case FetchMissing(number, entries, payloads):
                if entries:
                    self._net.sync_soon()
                self._fetch_for_check(number, payloads)
            case FinalizeRound():
                if self.reductions is not None:
                    self.reductions.decided(action.round, action.contributions)
                self.finals.add(action)
            case ReportDivergence(number, _, proposer, ours, theirs):
                self.log.event("divergence", round=number, peer=proposer, ours=ours.hex(), theirs=theirs.hex())
            case ReportNarrow(number, _, proposer, named, ours):
                self.log.event("narrow_set", round=number, peer=proposer, named=named, ours=ours)
            case ReportEquivocation(number, author, entry, reason):
                self.log.event("equivocation", round=number, peer=author, entry=entry.hex(), reason=reason)

    # --- actions --------------------------------------------------------------------------------

    async def _train(self, action: StartTraining) -> None:
        self.progress = None
        self.log.training(action.round)
        speeds = [view.tokens_per_s for view in self._members.values() if view.activity == "training"]
        self.tempo = choose(self.tempo, self.spec.steps(action.round), speeds)
        experts = self.handover.taken(self.share.experts, self.share.take(self._members))
        said = self.contributions.said(self.finals.applied)
        own = (self.tempo.chosen, action.after, experts, said, self.round.ahead.chosen)
        ask = TrainRequest(action.round, action.slot, action.slots, *own)
        if action.round == 0:
            await self._bring_moments(ask)
        done = await self.ask_until_saved(ask, TrainReply)
        self.tempo = measured(self.tempo, done.train_s, done.pending.steps)
        self.log.trained(done, ask.ahead)
        self.handover.offer(done.parted)
        self.feed_round(trained_of(done, action.after, self.now()))
        await self.ask_until_saved(SaveRequest(action.round), SaveReply)
        self.log.kept(action.round)
        self.feed_round(TrainingSaved(done.pending, self.now()))

    async def _bring_moments(self, ask: TrainRequest) -> None:
        """Of the experts that we have now. Nobody needs to wait for us: a lease tells that we live."""
        life, files = self.lives, files_for(self.spec.model, self.share.trained or ())

        def say(reason: str) -> None:
            self.waiting = reason

        await bring_moments(self.spec, files, self._net, say, lambda: False)
        self._check_need(ask, life)

    def _announce(self, pending: Pending) -> None:
        if self.contributions.is_ours(pending.round):
            return
        try:
            blob = self._net.add_blob(Path(pending.path))
        except DiskFault as error:
            self.disk_trouble(error)
            return
        if blob != pending.payload:  # the disk changed it; its final set will be without it
            self.log.event("payload_damaged", round=pending.round, path=pending.path)
            return
        body = contribution_of(pending)
        entry = self.publish(body)
        if entry is not None:  # its echo may come after the next look
            self.contributions.note(entry.id, self.me, body)

    def publish(self, body: Body) -> Entry | None:
        """Append to our feed; None when the disk refuses, which the user is told."""
        try:
            entry = self._net.publish(body)
        except DiskFault as error:
            self.disk_trouble(error)
            return None
        self._disk_works()
        return entry

    def disk_trouble(self, error: DiskFault) -> None:
        """The disk refused: the user is told, and the work is tried again."""
        if self.trouble != error.line():
            self.trouble = error.line()
            log.warning("%s", error.line())
            self.log.event("trouble", error=error.line())

    def _disk_works(self) -> None:
        """Something reached the disk."""
        if self.trouble:
            self.trouble = ""
            self.log.event("trouble_over")

    def _fetch_for_check(self, number: Round, entries: tuple[Digest, ...]) -> None:
        """Of a reduced round the check itself gets what it needs."""
        if not self._is_sliced(number):
            self.sets.want_payloads(entries)
            return
        for entry in entries:
            self.post(partial(self.feed_finality, EntryPayloadHeld(entry)))

    async def _fold(self, number: Round, names: tuple[Digest, ...]) -> None:
        folded = await self.sets.ask(number, names, lambda *parts: FoldRequest(number, *parts), FoldReply)
        self.feed_round(FoldDone(number, folded.state, self.now()))

    async def _check(self, action: CheckRound) -> None:
        number, names = action.round, action.contributions
        checked = await self.sets.ask(number, names, lambda *parts: CheckRequest(number, *parts), CheckReply)
        self.feed_finality(CheckDone(number, names, checked.state))

    def _closed(self, action: PublishAck) -> None:
        authors = self.contributions.authors(action.members)
        self.log.closed(action.round, action.set_digest, action.state, authors, self._net.bytes_moved())
        self.publish(Ack(action.round, action.set_digest, action.state))
        self.feed_finality(RoundClosed(action.round, action.members))
        self._evaluations.closed(action)

    def _put_lease(self) -> None:
        activity, number = self._lease
        offer = self.finals.offer
        speed = self.tempo.tokens_per_s or (self.progress.tokens_per_s if self.progress else 0.0)
        self._lease_at = self.now()
        blob, at = (offer.blob, offer.round) if offer else (b"", -1)
        lease = Lease(activity, number, Round(max(-1, self.finals.applied)), blob, at, speed)
        self._net.put_lease(lease, self.spec.pace.lease_s)
        self.share.say()

    # --- for Finals and tasks ---------------------------------------------------------------------

    async def ask(self, ask: Ask, kind: type[A]) -> A:
        """Ask the worker. Raises WorkerDied while it is not there, and what it answers."""
        if self.trainer is None or not self.worker_ready:
            raise WorkerDied("the worker is not running; it is being started")
        return await self.trainer.ask(ask, kind)

    async def ask_until_saved(self, ask: Ask, kind: type[A]) -> A:
        """Ask the worker; while the disk refuses, again and again, until the worker dies or nobody needs it."""
        life = self.lives
        while True:
            try:
                answer = await self.ask(ask, kind)
            except DiskFault as error:
                self.disk_trouble(error)
                await asyncio.sleep(DISK_RETRY_S)
                self._check_need(ask, life)
            else:
                self._disk_works()
                return answer

    def _check_need(self, ask: Ask, life: int) -> None:
        """Raise WorkerDied or Superseded for an ask that must not be repeated."""
        if life != self.lives:
            raise WorkerDied("the worker that was asked is gone")
        at_hand = (self.round.phase, self.round.round)
        if isinstance(ask, TrainRequest) and at_hand != (Phase.TRAIN, ask.round):
            raise Superseded(f"round {ask.round} is not trained any more")

    def finalized(self, action: FinalizeRound) -> None:
        """The worker holds Θ_final(round): tell both machines, drop what is not needed any more."""
        authors = self.contributions.authors(action.contributions)
        self.log.finalized(action.round, set_digest(list(action.contributions)), action.state, authors)
        self.sets.finalized(action.round, action.contributions)
        if self.reductions is not None:
            self.reductions.forget(action.round)
        self.feed_round(RoundFinal(action.round, self.now()))
        self.feed_finality(FinalApplied(action.round))

    def delete_blob(self, blob: Digest) -> None:
        """Forget a blob. A disk that refuses keeps the file, and the user is told."""
        try:
            self._net.delete_blob(blob)
        except DiskFault as error:
            self.disk_trouble(error)
