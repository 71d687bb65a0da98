"""Brings the worker's Θ_final up to the newest final round: payload by payload, or by a snapshot.

FinalizeRound actions queue up here in the order of the rounds; after a restart all of them come again. A round is
applied when its payloads are held. If they are not, and a live member offers a snapshot of a round in the queue,
the snapshot is fetched instead: at once if no member has the payloads any more, after PATIENCE_S if they may still
come. Its state digest must be the one in the round's certificate; `node/daemon/snapshots` tries who offers it.

The two newest snapshots of this node are kept; payloads of rounds before the older one are dropped.

A run whose Θ₀ is given by a file has it as the snapshot of round −1. It is the last offer to be tried: a node that
joins by a newer snapshot never needs it.
"""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from atoll.node.daemon.certificates.started_state import divergence, is_other, other_start
from atoll.node.daemon.consensus.types import FinalApplied, FinalizeRound
from atoll.node.daemon.coordinator.contribution_sets import ContributionSets
from atoll.node.daemon.core.interfaces import Network, RunContext
from atoll.node.daemon.core.runtime import EventQueue, FaultGuard, Machines, WorkerClient
from atoll.node.daemon.rounds.types import Behind, RoundFinal, WorkerReady
from atoll.node.daemon.snapshots.offers import OfferedSnapshot, SnapshotOffer, Trust, offers_of, trust_by
from atoll.node.daemon.snapshots.search import FoundSnapshot, SnapshotSearch
from atoll.p2p.system.atomic_files import disk
from atoll.protocols.errors import ConfigError, DiskFault, PeerFault, Unreachable
from atoll.protocols.ids import Digest, Round
from atoll.protocols.ledger.records import set_digest
from atoll.protocols.local import worker_messages
from atoll.protocols.run.bounds import snapshot_max_bytes

SNAPSHOT_EVERY = 5
"""Final rounds between two snapshots of this node."""
REMEMBERED = 64
"""Applied rounds that a worker may have to apply again: it saves a final round with the next trained one. What was
ours in older rounds `sets` remembers; a worker that lacks them adopts a snapshot."""
RECENT_SETS = 8
"""Whoever is in one of so many of the newest final sets is believed first."""
PATIENCE_S = 20.0
"""Seconds of waiting for payloads that others should still hold, before a whole snapshot is fetched instead."""

_NONE = Round(-1)


@dataclass(kw_only=True)
class Finalizer:
    """Applies final rounds in order. All of its work but downloads goes on in one task at a time."""

    context: RunContext
    net: Network
    spool: Path
    """Where the worker writes snapshots before they become blobs."""
    queue: EventQueue
    machines: Machines
    worker: WorkerClient
    guard: FaultGuard
    sets: ContributionSets
    on_applied: Callable[[Round, Digest], None] = lambda number, state: None
    """Called with a final round that the worker's Θ_final holds, and its state; after a restart again."""
    leave_unmarked: Callable[[Round, Digest], bool] = lambda number, state: False
    """Begin again without the worker's state of this round if it is of another chain. Returns whether it is."""
    has_model: bool = True
    """Whether there will be a worker. Else a final round counts as applied when it is known."""
    applied: Round = _NONE
    """The newest round in the worker's Θ_final."""
    offer: SnapshotOffer | None = None
    """The newest snapshot of this node."""
    is_synced: bool = False
    """The ledger is as complete as it can be now. Nothing is applied before."""
    left_with: Round | None = None  # after a change of chain, while the worker starts: the model it will have
    _pending: tuple[worker_messages.Pending, ...] = ()
    """Trained work that the worker found on its disk, until the round machine knows it."""
    _older_offer: SnapshotOffer | None = None
    _waiting_rounds: dict[int, FinalizeRound] = field(default_factory=dict)
    _applied_rounds: dict[int, FinalizeRound] = field(default_factory=dict)
    _found: tuple[Round, Digest] = _NONE, Digest(b"")  # by the newest worker, when it started
    _busy: bool = False
    _announced: bool = False
    _waiting: tuple[int, float] = (-1, 0.0)
    """The round whose payloads are waited for, and since when."""
    search: SnapshotSearch = field(init=False)

    def __post_init__(self) -> None:
        self.search = SnapshotSearch(
            net=self.net,
            max_bytes=snapshot_max_bytes(self.context.spec),
            now=self.context.now,
            start_task=self.queue.start_task,
            on_begin=self._report_fetching,
            on_failure=self._on_no_snapshot,
            on_end=lambda: self.queue.post(self.step),
            delete=self.guard.delete_blob,
        )

    @property
    def _is_empty(self) -> bool:
        """The worker has no weights at all."""
        return self.applied == worker_messages.NOTHING_YET

    @property
    def snapshots(self) -> set[Digest]:
        """Blobs that this node offers, or can go back to."""
        return {offer.blob for offer in self._own_offers()}

    @property
    def final_sets(self) -> dict[int, tuple[Digest, ...]]:
        """Final sets by round: those that wait, and those that were applied lately."""
        return {at: done.contributions for at, done in (self._applied_rounds | self._waiting_rounds).items()}

    def add(self, action: FinalizeRound) -> None:
        """Queue a round that became final."""
        if not self.has_model:
            self.applied = max(self.applied, action.round)
            self._drop_payloads(self.applied - SNAPSHOT_EVERY, set())
        if action.round > self.applied:
            self._waiting_rounds[action.round] = action
            self.step()
        elif not is_other(self._found, action, self.leave_unmarked):
            self._report_final(action)

    def on_worker_started(self, started: worker_messages.StartReply) -> None:
        """A fresh worker holds Θ_final(started.final). Raises Divergence if no chain has that state."""
        self._pending, self.left_with = started.pending, None
        final, _ = self._found = Round(started.final), started.state
        action = self._waiting_rounds.get(final) or self._applied_rounds.get(final)
        if action is not None and is_other(self._found, action, self.leave_unmarked):
            self.worker.on_gone()  # nothing can be asked of it until it starts anew
            return
        start = self.context.spec.start
        if start and final == -1 and started.state != start.state:
            raise other_start()
        self._announced = False
        self._advance_to(final)
        self._waiting_rounds |= {at: done for at, done in self._applied_rounds.items() if at > final}
        self.applied = final
        self.machines.feed_finality(FinalApplied(final))
        self.step()

    def step(self) -> None:
        """Start whatever can be done next. Harmless at any time."""
        if self._busy or not self.is_synced:
            return
        if not self.worker.is_ready:
            if self.left_with is not None and self.search.newest() is None:
                self.search.step([one for one in self._offers() if self._is_time_for(one)], self._is_wanted)
            return
        if not self._waiting_rounds and not self._is_empty:
            self.search.step((), self._is_wanted)
            self._announce_ready()
            return
        action = self._waiting_rounds.get(self.applied + 1)
        if action and self._is_available(action):
            self._begin(self._apply(action), f"finalize {action.round}")
            return
        offers = [offer for offer in self._offers() if self._is_time_for(offer)]
        self.search.step(offers, self._is_wanted)
        found, others = self.search.newest(), self.search.under_way()
        if found is not None:
            self._begin_adopting(found)
        elif action and (self.search.book.has_failed() or not any(map(self._is_time_for, others))):
            # Those after it, too, if they are few: of more most wait, as a newer snapshot may come.
            is_near = max(self._waiting_rounds) < self.applied + SNAPSHOT_EVERY
            for at in sorted(self._waiting_rounds) if is_near else (action.round,):
                self.sets.fetch(Round(at), self._waiting_rounds[at].contributions)

    def _is_available(self, action: FinalizeRound) -> bool:
        can_correct = self.sets.are_correctable(action.corrections, action.round)  # gets what a correction lacks
        return can_correct and self.sets.is_available(action.round, action.contributions)

    def _announce_ready(self) -> None:
        if not self._announced:
            self._announced = True
            pending, self._pending = self._pending, ()
            self.machines.feed_round(WorkerReady(self.applied, pending, self.context.now()))
            if self.offer is None and self.applied >= 0:
                self._begin(self._snapshot(self.applied), f"snapshot {self.applied}")

    def _own_offers(self) -> list[SnapshotOffer]:
        return [offer for offer in (self.offer, self._older_offer) if offer is not None]

    def _is_time_for(self, offer: OfferedSnapshot) -> bool:
        """Payloads are much smaller than a snapshot, but members keep them for SNAPSHOT_EVERY rounds only."""
        now = self.context.now()
        following = 1 + (self.applied if self.left_with is None else self.left_with)
        if self._waiting[0] != following:
            self._waiting = (following, now)
        are_gone = following < offer.round - SNAPSHOT_EVERY
        return are_gone or self._is_empty or now - self._waiting[1] >= PATIENCE_S

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._busy = True
        self.queue.start_task(self._run_alone(work), name)

    async def _run_alone(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        finally:
            self._busy = False
        self.search.forget(self.applied, self.snapshots | self.context.kept)
        self.queue.post(self.step)

    async def _apply(self, action: FinalizeRound) -> None:
        number, names = action.round, action.contributions
        request_of, kind = partial(worker_messages.FinalizeRequest, number), worker_messages.FinalizeReply
        done = await self.sets.ask(number, names, request_of, kind, action.corrections)
        self.context.log.folded(number, done.state)
        if done.state != action.state:
            raise divergence(action, done.state)
        self._advance_to(number)
        if (action.round + 1) % SNAPSHOT_EVERY == 0:
            await self._snapshot(action.round)

    def _advance_to(self, number: Round) -> None:
        self.applied = number
        for at in sorted(at for at in self._waiting_rounds if at <= number):
            self._applied_rounds[at] = self._waiting_rounds.pop(at)
            self._report_final(self._applied_rounds[at])
        for at in sorted(self._applied_rounds)[:-REMEMBERED]:
            del self._applied_rounds[at]

    def _report_final(self, action: FinalizeRound) -> None:
        """The worker's Θ_final holds this round: tell both machines, forget what is not needed any more."""
        authors = self.sets.set_applied(action.round, action.contributions)
        self.context.log.finalized(action.round, set_digest(list(action.contributions)), action.state, authors)
        self.machines.feed_round(RoundFinal(action.round, self.context.now()))
        self.machines.feed_finality(FinalApplied(action.round))
        self.on_applied(action.round, action.state)

    # --- snapshots of this node -------------------------------------------------------------------

    async def _snapshot(self, number: Round) -> None:
        """Take a snapshot; if the disk refuses, the next comes SNAPSHOT_EVERY rounds later."""
        path = self.spool / f"snapshot-{number}.safetensors"
        try:
            done = await self.worker.ask(worker_messages.SnapshotRequest(str(path)), worker_messages.SnapshotReply)
            blob = self._store_snapshot(Path(done.path))
        except DiskFault as error:
            self.guard.on_disk_fault(error)
            return
        self._offer_snapshot(SnapshotOffer(self.context.me, blob, done.round))

    def _store_snapshot(self, path: Path) -> Digest:
        """Move the worker's file into the blob store. Raises DiskFault."""
        blob = self.net.add_blob(path, move=True)
        with disk(path):
            path.unlink(missing_ok=True)
        return blob

    def _offer_snapshot(self, offer: SnapshotOffer) -> None:
        """Offer this snapshot from now on; delete the one before the last."""
        if self.offer is not None and self.offer.blob == offer.blob:
            return
        oldest, self._older_offer, self.offer = self._older_offer, self.offer, offer
        if oldest is not None and oldest.blob not in self.snapshots:
            self.guard.delete_blob(oldest.blob)
        if self._older_offer is not None:
            self._drop_payloads(min(self._older_offer.round, offer.round), self.snapshots)
            self._drop_start()

    def _drop_payloads(self, before: int, needed: set[Digest]) -> None:
        """Forget the rounds before this one, and delete their payloads, as far as no correction may need them."""
        # Also of who goes back to the older snapshot, or begins with it: it corrects rounds before that one.
        self.sets.drop(Round(max(-1, before - (self.context.spec.pace.excise_rounds or 0))), needed)

    def _drop_start(self) -> None:
        """Delete Θ₀ and its moments: no member begins at round 0 any more. The run's owner keeps the files."""
        spec = self.context.spec
        given = (Digest(spec.start.weights), *spec.start.moment_blobs) if spec.start else ()
        for blob in filter(self.net.has_blob, given if self.context.me != spec.owner else ()):
            self.guard.delete_blob(blob)

    # --- snapshots of others ----------------------------------------------------------------------

    def _begin_adopting(self, found: FoundSnapshot) -> None:
        ours = self._ours_up_to(found.offer.round) if found.offer.round >= 0 else ()
        if ours is None:
            self.net.sync_soon()
        else:
            self.search.take(found)
            self._begin(self._adopt(found, ours), f"adopt {found.offer.round}")

    async def _adopt(self, found: FoundSnapshot, ours: tuple[worker_messages.Counted, ...]) -> None:
        """Replace the worker's Θ_final by a snapshot, if it is the state that it was offered as."""
        offer, is_start = found.offer, found.offer.round < 0
        self._announced = False
        self._report_behind(f"applying {'the start weights' if is_start else f'the model of round {offer.round}'}")
        try:
            request = worker_messages.AdoptRequest(offer.round, str(found.path), offer.state, ours)
            await self.worker.ask_until_saved(request, worker_messages.AdoptReply)
        except (DiskFault, Unreachable, PeerFault, TimeoutError) as error:
            self.search.book.add(offer, error, self.context.now())
            await self._on_no_snapshot(offer, error)
            return
        self._advance_to(offer.round)
        if is_start:
            self.machines.feed_finality(FinalApplied(offer.round))
        else:
            self._offer_snapshot(SnapshotOffer(self.context.me, offer.blob, offer.round))

    def _report_fetching(self, offer: OfferedSnapshot) -> None:
        if offer.round >= 0:
            self._report_behind(f"fetching the model of round {offer.round} from …{offer.peers[0][-8:]}")
        elif not self.search.book.has_failed(offer):
            self._report_behind("fetching the start weights")

    async def _on_no_snapshot(self, offer: OfferedSnapshot, error: Exception) -> None:
        if offer.round < 0:
            await self._on_no_start(offer, error)
        peer = offer.peers[0]
        self.context.log.event("snapshot_failed", peer=peer, round=offer.round, error=str(error))
        if isinstance(error, DiskFault):
            self.guard.on_disk_fault(error)
        elif isinstance(error, PeerFault):
            # A true blob that a liar offers as another round's is needed yet.
            if all(one.blob != offer.blob or one.round == offer.round for one in offers_of(self.net.leases())):
                self.guard.delete_blob(offer.blob)
            if peer != self.context.me and offer.round >= 0 and self.search.book.is_fault(offer, error):
                self.guard.blame(peer, error)

    async def _on_no_start(self, offer: OfferedSnapshot, error: Exception) -> None:
        """Report why training does not begin. Raises ConfigError if the file itself is not what the run names."""
        blob = offer.blob
        if isinstance(error, PeerFault) and (not self.net.has_blob(blob) or await self.net.is_whole(blob)):
            raise ConfigError(
                f"the start weights of this run cannot be used: {error}", hint="ask its owner"
            ) from error
        if not isinstance(error, DiskFault | PeerFault):
            self._report_behind("waiting for the start weights: nobody reachable has them yet")

    def _report_behind(self, reason: str) -> None:
        self.machines.feed_round(Behind(reason, self.context.now()))

    def _ours_up_to(self, number: Round) -> tuple[worker_messages.Counted, ...] | None:
        """Return what of this node counts in the queued sets up to `number`; None if the ledger lacks part."""
        # The worker may lack rounds that are not queued any more, and hold work that counted in them.
        counted = [*self.sets.counted_before(min(self._waiting_rounds), self.applied)]
        for at in sorted(at for at in self._waiting_rounds if at <= number):
            action = self._waiting_rounds[at]
            if (ours := self.sets.counted(action.round, action.contributions)) is None:
                return None
            counted += ours
        return tuple(counted)

    def _is_wanted(self, offer: OfferedSnapshot) -> bool:
        """Return whether a download still helps. After a change of chain its round may have another state."""
        if offer.round < 0:
            return self._is_empty
        action = self._waiting_rounds.get(offer.round)
        return action is not None and action.state == offer.state

    def _offers(self) -> list[OfferedSnapshot]:
        """Return the snapshots that may be tried now. An own one helps if the worker lost more than payloads."""
        spec, now, sort = self.context.spec, self.context.now(), self.search.book.sort
        newest = [self._waiting_rounds[at].contributions for at in sorted(self._waiting_rounds)[-RECENT_SETS:]]
        recent = {author for names in newest for author in self.sets.index.authors(names)}
        states = {at: action.state for at, action in self._waiting_rounds.items()}
        offers = [*self._own_offers(), *offers_of(self.net.leases())]
        found = sort(offers, states, trust_by(self.context.me, recent, self.net.is_tried), now)
        if self._is_empty:
            assert spec.start, "only a run whose start is given has workers without weights"
            start = SnapshotOffer(spec.owner, Digest(spec.start.weights), _NONE)
            found += sort([start], {_NONE: Digest(spec.start.state)}, lambda peer: Trust.START, now)
        return found
