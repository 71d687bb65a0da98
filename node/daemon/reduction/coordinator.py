"""This node's part in reduced rounds: their sets, its own slice, and the questions of others.

Each open round has a machine of its own (`reduction/machine.py`); here its events are made and its actions are
performed. The round machine decides, as in all rounds, which members a round waits for and when it closes. It gets
PayloadHeld for a contribution once the rows that this node reduces are here, and SetResolved once the set is.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from atoll.node.daemon.certificates.reducers import ReducerHistory
from atoll.node.daemon.consensus.types import ReductionCleared, ReductionRefuted
from atoll.node.daemon.coordinator.contribution_sets import ContributionIndex
from atoll.node.daemon.coordinator.payload_fetcher import PayloadFetcher
from atoll.node.daemon.core.interfaces import Network, RunContext
from atoll.node.daemon.core.runtime import EventQueue, FaultGuard, Machines, WorkerClient
from atoll.node.daemon.reduction import machine as reduction_machine
from atoll.node.daemon.reduction.audit import AGAIN, ReducerAuditor
from atoll.node.daemon.reduction.complaints import Complaints
from atoll.node.daemon.reduction.doubts import Doubts
from atoll.node.daemon.reduction.effective_set import EffectiveSlice
from atoll.node.daemon.reduction.fault_reports import FaultReports
from atoll.node.daemon.reduction.ledger_view import ReductionLedger
from atoll.node.daemon.reduction.reduced_set import ReducedSet, SliceStore
from atoll.node.daemon.reduction.row_fetcher import RowFetcher, RowStore
from atoll.node.daemon.rounds.types import PayloadHeld, ReductionPlanned, SetResolved
from atoll.node.ipc.worker_process import WorkerDied
from atoll.protocols.errors import AtollError, CorruptFault, DecodeError, DiskFault
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.records import Entry, Reduction, ReductionFault, Unanswered
from atoll.protocols.ledger.reduction import Claim, Offer, OpeningAsk, cover, decode_ask, rules_of
from atoll.protocols.local.worker_messages import OpenReply, OpenRequest, Published, ReduceReply
from atoll.protocols.run.arena import Span

log = logging.getLogger(__name__)

PATIENCE_ROUNDS = 1.0
MIN_PATIENCE_S = 3.0
"""Patience with reducers after a round closed here: this many round times, and at least so many seconds."""
OPENING_ROUNDS = 0.5
MIN_OPENING_S = 5.0
"""Patience with one opening, in round times, and at least so many seconds. A complaint and the answers to it must
fit into the round that lies between a fold and the proposal of its set."""
RETRY_S = 1.0


@dataclass(slots=True)
class OpenRound:
    """One reduced round that is not final."""

    state: reduction_machine.State
    closed_at: float | None = None
    impatient_at: float | None = None
    parts: dict[tuple[Digest, ...], tuple[EffectiveSlice, ...]] = field(default_factory=dict)
    """What counts in the sets that this node made."""


@dataclass(kw_only=True)
class ReductionCoordinator:
    """Runs the machines of all open reduced rounds. Implements `RoundReducer` and `SlicedSets`: see there."""

    context: RunContext
    net: Network
    spool: Path
    queue: EventQueue
    machines: Machines
    worker: WorkerClient
    guard: FaultGuard
    fetcher: PayloadFetcher
    """Fetches the payloads of Reductions too."""
    contributions: ContributionIndex
    applied: Callable[[], Round]
    """Returns the newest round in the worker's Θ_final."""
    on_rows: Callable[[], None]
    """Called when wanted rows are here."""
    rng: random.Random
    """Chooses the chunks to audit: reducers must not be able to foresee it."""
    _rounds: dict[int, OpenRound] = field(default_factory=dict)
    _reducing: set[int] = field(default_factory=set)
    _excluded: dict[PeerId, Round] = field(default_factory=dict)
    """The first round without an author that is excluded."""
    _counted: set[Digest] = field(default_factory=set)
    """Reductions in final sets."""

    def __post_init__(self) -> None:
        spec = self.context.spec
        assert spec.reduce is not None, "a run without `reduce` gets NoReduction"
        self.ledger = ReductionLedger(self.context.me, rules_of(spec), spec.reduce)
        self._rows = RowFetcher(
            net=self.net,
            ledger=self.ledger,
            payloads=self.fetcher,
            store=RowStore(self.spool / "rows"),
            start_task=self.queue.start_task,
            on_fault=self.guard.blame,
            on_disk_fault=self.guard.on_disk_fault,
        )
        self._doubts = self._build_doubts()
        self._store = SliceStore(self.net, self.ledger, self.fetcher, self._rows)
        self.fetcher.subscribe(self._on_payload)
        self.net.answer_by(self._answer)

    def _build_doubts(self) -> Doubts:
        ask, blame, publish = self.worker.ask, self.guard.blame, self.guard.publish

        def log_event(event: str, claim: Claim) -> None:
            self.context.log.event(event, round=claim.body.round, peer=claim.author, entry=claim.entry.hex())

        auditor = ReducerAuditor(
            net=self.net,
            ledger=self.ledger,
            spool=self.spool,
            ask=ask,
            publish=publish,
            on_fault=blame,
            on_unanswered=lambda *one: self._doubts.on_unanswered(*one),
            patience_s=self._opening_s,
            rng=self.rng,
        )
        return Doubts(
            ledger=self.ledger,
            auditor=auditor,
            reports=FaultReports(net=self.net, rules=self.ledger.rules, ask=ask, on_fault=blame),
            complaints=Complaints(self.context.me, publish, lambda entry: self._doubts.on_silent(entry)),
            start_task=self.queue.start_task,
            last_final=lambda: self.machines.finality.last_final,
            on_doubt=self._on_doubt,
            on_cleared=self._on_cleared,
            on_event=log_event,
        )

    def _opening_s(self) -> float:
        return max(MIN_OPENING_S, OPENING_ROUNDS * self.machines.round.train_s)

    # --- RoundReducer -----------------------------------------------------------------------------

    def is_reduced(self, number: int) -> bool:
        return bool(self.ledger.plan(number).reducers)

    def add_entry(self, entry: Entry, *, is_orphan: bool = False) -> None:
        if is_orphan:
            self.ledger.add_orphan(entry)
            return
        known = self.ledger.add(entry)
        if isinstance(known, Offer):
            self._feed_offer(entry.body.round, known)
        elif isinstance(known, Claim):
            self._doubts.add_claim(known)
            # A wrong Reduction taints those that continue it, so the machines of later rounds need it too.
            for number in [at for at in self._rounds if at >= entry.body.round]:
                self._feed(number, reduction_machine.ClaimSeen(known))
        elif isinstance(entry.body, ReductionFault):
            self._doubts.add_fault(entry.author, entry.body)
        elif isinstance(entry.body, Unanswered):
            self._doubts.add_complaint(entry.author, entry.body)

    def forget_author(self, author: PeerId) -> None:
        finality = self.machines.finality
        # No plan can be known beyond `gap`. What finality keeps of an author may be named by a set.
        first = finality.last_final + 1 + self.ledger.spec.gap
        kept = {entry for book in finality.books.values() for entry in book.contributions}
        self.ledger.forget_author(author, first, kept)
        self._doubts.forget_author(author)

    def set_final(self, number: Round, names: tuple[Digest, ...]) -> None:
        self.ledger.decide(number, names)
        reductions = tuple(name for name in names if name in self.ledger.claims)
        if reductions:
            self._counted.update(reductions)
            self._doubts.acquit(reductions)

    def history(self) -> ReducerHistory:
        return self.ledger.history()

    def resume(self, history: ReducerHistory) -> None:
        self.ledger.resume(history)

    def distrusted(self) -> dict[PeerId, int]:
        """Return the members whose Reductions do not count now, with the last round in which none will."""
        number, rounds = self.machines.finality.last_final + 1, self.context.spec.outer.rounds
        until = {**self.ledger.passed_over(number), **self._doubts.distrusted(number, rounds - 1)}
        return {peer: min(last, rounds - 1) for peer, last in until.items()}

    def close_round(self, number: Round) -> None:
        if number in self._rounds:
            self._rounds[number].closed_at = self.context.now()
            self._feed(number, reduction_machine.Collected())

    def exclude(self, author: PeerId, first: Round) -> None:
        self._excluded[author] = min(first, self._excluded.get(author, first))
        for number in [at for at in self._rounds if at >= first]:
            self._feed(number, reduction_machine.Excluded(author))

    def step(self) -> None:
        """Open rounds whose plan is known by now, lose patience with reducers, check reported faults."""
        last = self.machines.finality.last_final
        for number in [at for at in self._rounds if at <= last]:
            del self._rounds[number]
        # A final set names the reducers `gap` rounds later, so no plan can be known beyond that.
        for number in range(last + 1, last + 1 + self.ledger.spec.gap):
            if self.is_reduced(number) and number not in self._rounds:
                self._open(number)
        for number in list(self._rounds):
            self._rank(number)
            self._lose_patience(number)
        if self._doubts.faults or self._doubts.unheard:
            self._doubts.step(self.worker.is_ready)

    # --- SlicedSets -------------------------------------------------------------------------------

    def find(self, number: Round, names: tuple[Digest, ...]) -> ReducedSet | None:
        has_reduction = any(self.ledger.find_claim(name) for name in names)
        # Without a Reduction all rows count raw, and a node that holds the whole payloads needs no slices.
        is_whole = all(self.contributions.is_held(entry) for entry, _, _ in self.contributions.find(names))
        if not has_reduction and (is_whole or not self.is_reduced(number)):
            return None
        return ReducedSet(
            number=number,
            names=names,
            parts_of=self._parts_of,
            fetch_part=self._fetch_part,
            store=self._store,
            worker=self.worker,
            guard=self.guard,
            log=self.context.log,
            applied=self.applied,
        )

    def forget(self, final: Round) -> None:
        self._rows.forget(final)

    def payloads(self, first: Round) -> set[Digest]:
        return self.ledger.reduced_payloads(first) | self._doubts.reports.proofs(first)

    def forget_payloads(self, before: Round) -> set[Digest]:
        old = self.payloads(Round(0)) - self.payloads(before)
        self.ledger.forget(before)
        self._doubts.forget(before)
        self._counted &= self.ledger.claims.keys()
        try:
            self._rows.store.keep_only(self.ledger.entries.keys() | self.ledger.orphans.keys())
        except DiskFault as error:
            self.guard.on_disk_fault(error)
        return old

    def _parts_of(self, number: Round, names: tuple[Digest, ...]) -> tuple[EffectiveSlice, ...] | None:
        """Return what counts in each slice of a set: as our machine found it, else as the ledger alone says."""
        open_round = self._rounds.get(number)
        parts = open_round.parts.get(names) if open_round is not None else None
        return parts or self.ledger.parts(number, names)

    def _fetch_part(self, number: Round, part: EffectiveSlice) -> None:
        if part.reduced is not None:
            self.fetcher.fetch(part.reduced.body, part.reduced.author)
        for offer in part.raw:
            if not self._rows.store.has(offer.entry, part.span):
                self._fetch_rows(number, offer, part.span)

    # --- the machines of open rounds --------------------------------------------------------------

    def _open(self, number: int) -> None:
        plan = self.ledger.plan(number)
        state = reduction_machine.State(
            self.ledger.me, Round(number), plan, self.ledger.rules.run, self.machines.finality.seniority
        )
        self._rounds[number] = OpenRound(state)
        self.machines.feed_round(ReductionPlanned(Round(number), self.context.now()))
        for author in [author for author, first in self._excluded.items() if number >= first]:
            self._feed(number, reduction_machine.Excluded(author))
        # Faults before Reductions, so that a wrong one is never asked for.
        for entry in self._doubts.bad:
            self._feed(number, reduction_machine.Wrong(entry))
        for claim in list(self.ledger.claims.values()):
            if claim.body.round <= number:
                self._feed(number, reduction_machine.ClaimSeen(claim))
        for offer in self.ledger.offers(number):
            self._feed_offer(number, offer)

    def _feed_offer(self, number: Round | int, offer: Offer) -> None:
        if number not in self._rounds:
            return
        self._feed(number, reduction_machine.OfferSeen(offer))
        if self.ledger.plan(number).span_of(self.ledger.me) is None:
            # A node that reduces no slice needs nothing of a contribution before the round closes.
            self._report_held(offer)

    def _report_held(self, offer: Offer) -> None:
        """Tell the round machine that all this node needs of a contribution before its round closes is here."""
        held = PayloadHeld(offer.entry, self.ledger.contribution(offer.entry).round, self.context.now())
        self.queue.post(lambda: self.machines.feed_round(held))

    def _feed(self, number: int, event: reduction_machine.Event) -> None:
        open_round = self._rounds.get(number)
        if open_round is None:
            return
        open_round.state, actions = reduction_machine.step(open_round.state, event)
        for action in actions:
            match action:
                case reduction_machine.FetchRows(offer, span):
                    self._fetch_rows(number, offer, span)
                case reduction_machine.FetchReduction(claim):
                    self.fetcher.fetch(claim.body, claim.author)
                    self.queue.post(partial(self._check_claim, claim))  # perhaps it is held already
                case reduction_machine.ReduceSlice(span, offers):
                    self._start_reducing(number, span, offers)
                case reduction_machine.FoldSlices(parts, entries):
                    self._report_set(open_round, parts, entries)

    def _report_set(
        self, open_round: OpenRound, parts: tuple[EffectiveSlice, ...], entries: tuple[Digest, ...]
    ) -> None:
        """Tell the round machine what is to be folded; audit the round's Reductions once."""
        number, is_first = open_round.state.number, not open_round.parts
        # Kept by set: the fold asks for it by its entries, and an older set may still be in the worker's hands.
        open_round.parts[entries] = parts
        known = SetResolved(number, entries, self.context.now())
        self.queue.post(lambda: self.machines.feed_round(known))
        reduced = sum(part.reduced is not None for part in parts)
        self.context.log.event("slices", round=number, reduced=reduced, raw=len(parts) - reduced)
        if is_first:
            self._doubts.sample(number, parts)

    def _rank(self, number: int) -> None:
        """Say whose work comes first, if that changed."""
        seniority = self.machines.finality.seniority
        if self._rounds[number].state.seniority != seniority:
            self._feed(number, reduction_machine.Ranked(seniority))

    def _lose_patience(self, number: int) -> None:
        """End the wait for reducers, then for rows that nobody gives: an author may be dead, or lie."""
        open_round, now = self._rounds[number], self.context.now()
        if open_round.closed_at is None:
            return
        spans, plan = reduction_machine.missing_slices(open_round.state), open_round.state.plan
        live = {*self.machines.round.members, self.ledger.me}
        is_coming = any(plan.reducers[plan.spans.index(span)] in live for span in spans)
        patience_s = max(MIN_PATIENCE_S, PATIENCE_ROUNDS * self.machines.round.train_s)
        if open_round.impatient_at is None and (not is_coming or now - open_round.closed_at >= patience_s):
            open_round.impatient_at = now
            self._feed(number, reduction_machine.PatienceOver())
        if open_round.parts or open_round.impatient_at is None:
            return  # nothing is missing, or the reducers are still waited for
        # One lease: by then a dead holder has left the membership, and nobody else is expected to serve the rows.
        # A lost connection says so at once. Should the holder live, what it serves later is folded again.
        is_lost = all(map(self._is_lost, reduction_machine.missing_authors(open_round.state)))
        if now >= open_round.impatient_at + (patience_s if is_lost else self.context.spec.pace.lease_s):
            self._give_up(number, open_round, now)

    def _is_lost(self, peer: PeerId) -> bool:
        """Return whether a member's lease is over, the connection to it is lost, or it is absent."""
        view = self.machines.round.members.get(peer)
        return view is None or view.lost_at is not None or peer in self.machines.round.absent

    def _give_up(self, number: int, open_round: OpenRound, now: float) -> None:
        """Fold without Reductions that nobody gives; if those are here, without rows that nobody gives."""
        lost = reduction_machine.missing_payloads(open_round.state)
        if lost:
            open_round.impatient_at = now  # the rows that are needed instead get as much time
        else:
            offers = (offer for offer in self.ledger.offers(number) if offer.author != self.ledger.me)
            lost = tuple(offer.entry for offer in offers if offer.entry not in open_round.state.gone)
        for entry in lost:
            self._feed(number, reduction_machine.Gone(entry))

    def _fetch_rows(self, number: int, offer: Offer, span: Span) -> None:
        def on_held() -> None:
            self.queue.post(lambda: self._on_rows_held(number, offer, span))

        self._rows.fetch(number, offer, span, on_held)

    def _on_rows_held(self, number: int, offer: Offer, span: Span) -> None:
        self._feed(number, reduction_machine.RowsHeld(offer.entry, span))
        if self.ledger.plan(number).span_of(self.ledger.me) == span and number in self._rounds:
            # Rows are the work of one author, whoever names them too.
            if self.contributions.first_author(self.ledger.contribution(offer.entry).payload) == offer.author:
                self.net.vouch(offer.author)
            self._report_held(offer)
        self.on_rows()

    def _on_payload(self, payload: Digest) -> None:
        """A payload is held or void: look at every Reduction that names it."""
        for claim in [claim for claim in self.ledger.claims.values() if claim.body.payload == payload]:
            self._check_claim(claim)

    def _check_claim(self, claim: Claim) -> None:
        if self.fetcher.is_void(claim.body) and claim.entry not in self._doubts.bad:
            self._doubts.condemn(claim.entry)
        elif self.fetcher.is_held(claim.body):
            self._feed(claim.body.round, reduction_machine.ReductionHeld(claim.entry))

    # --- this node's slice ------------------------------------------------------------------------

    def _start_reducing(self, number: int, span: Span, offers: tuple[Offer, ...]) -> None:
        if number not in self._reducing:
            self._reducing.add(number)
            self.queue.start_task(self._reduce(number, span, offers), f"reduce {number}")

    async def _reduce(self, number: int, span: Span, offers: tuple[Offer, ...]) -> None:
        """Reduce and publish; again with the next worker if this one dies, until it is too late."""
        here, life = list[Offer](), -1
        while number in self._rounds and self.ledger.ours(number) is None:
            # In one life the worker reduces a round once, and repeats that reply. So the offers stay fixed for a
            # life: to claim rows that came later would be proven wrong.
            if life != self.worker.lives:
                here = [offer for offer in sorted(offers) if self._rows.has(offer, span)]
                life = self.worker.lives
            try:
                before = self.ledger.newest_of_ours(number)
                request = self._store.reduce_request(Round(number), span, here, before)
                done = await self.worker.ask_until_saved(request, ReduceReply)
                if self._publish(number, span, here, done):
                    return
            except (DecodeError, CorruptFault):
                life = -1  # nothing was reduced, so other rows may be named
                for offer in offers:
                    self._rows.store.drop(offer.entry, span)
            except AtollError as error:
                log.debug("reducing round %d: %s", number, error)
            await asyncio.sleep(RETRY_S)

    def _publish(self, number: int, span: Span, offers: list[Offer], done: ReduceReply) -> bool:
        """Return whether nothing is left to do: False if the disk refused the record. Raises DiskFault."""
        blob = self.net.add_blob(Path(done.path))
        # A file that the disk changed cannot be repaired: the worker has gone on from this Reduction.
        if blob != done.payload or number not in self._rounds:
            return True
        covered, more, members = cover(offers, self.ledger.plan(number))
        before = self.ledger.ours(done.previous) if done.previous >= 0 else None
        body = Reduction(
            round=Round(number),
            span=span,
            covered=covered,
            more=more,
            members=members,
            payload=done.payload,
            rows=done.rows,
            kept=done.kept,
            previous=before.entry if before else b"",
        )
        return self.guard.publish(body) is not None

    # --- faults, and questions of others ----------------------------------------------------------

    def _on_doubt(self, entry: Digest, refuted: frozenset[Digest], is_proven: bool) -> None:
        """Raw rows take the place of a Reduction, and no set that is made of it is voted for."""
        for number in list(self._rounds):
            self._feed(number, reduction_machine.Wrong(entry))
        for doubted in refuted:
            self.machines.feed_finality(ReductionRefuted(doubted, is_proven))

    def _on_cleared(self, entry: Digest, cleared: frozenset[Digest]) -> None:
        for number in list(self._rounds):
            self._feed(number, reduction_machine.Righted(entry))
        for believed in cleared:
            self.machines.feed_finality(ReductionCleared(believed))

    async def _answer(self, peer: PeerId, question: bytes) -> bytes:
        ask = decode_ask(question)
        if not isinstance(ask, OpeningAsk):
            return self._rows.answer(ask)
        claim = self.ledger.claims.get(ask.reduction)
        if claim is None or claim.author != self.ledger.me or not claim.body.span.holds(ask.chunk):
            return b""
        # The worker forgets how it reduced what a final set holds. What missed its set is opened, so that others
        # see that it was right.
        if claim.entry in self._counted or not self._doubts.auditor.may_ask(peer, claim):
            return b""
        try:
            async with asyncio.timeout(AGAIN * self._opening_s()):
                return await self._open_ours(claim, ask.chunk)
        except (AtollError, TimeoutError) as error:
            log.debug("an opening for …%s: %s", peer[-6:], error)
            return b""

    async def _open_ours(self, claim: Claim, chunk: int) -> bytes:
        """Return an opening of the worker; one that is being started is waited for. Raises AtollError."""
        again: tuple[Published, ...] = ()
        while True:
            try:
                return (await self.worker.ask(OpenRequest(claim.body.round, chunk, again), OpenReply)).opening
            except WorkerDied:
                await asyncio.sleep(RETRY_S)
            except AtollError:
                # Perhaps a worker of an earlier life reduced it. Asked a second time, it cannot be opened.
                if again or not (again := self._store.published(claim.body.round)):
                    raise
