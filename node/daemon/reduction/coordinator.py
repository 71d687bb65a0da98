"""This node's part in reduced rounds: their sets, its own slice, and the questions of others.

Each open round has a machine of its own (`reduction/machine.py`); here its events are made and its actions are
performed. The round machine decides, as in all rounds, which members a round waits for and when it closes. It gets
PayloadHeld for a contribution once the rows that this node reduces are here, and SetResolved once the set is.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

from atoll.node.daemon.consensus.types import ReductionRefuted
from atoll.node.daemon.coordinator.contribution_sets import ContributionIndex
from atoll.node.daemon.coordinator.interfaces import Network, RunContext
from atoll.node.daemon.coordinator.payload_fetcher import PayloadFetcher
from atoll.node.daemon.coordinator.runtime import EventQueue, FaultGuard, Machines, WorkerClient
from atoll.node.daemon.reduction import machine as reduction_machine
from atoll.node.daemon.reduction.audit import Auditor
from atoll.node.daemon.reduction.effective_set import EffectiveSlice
from atoll.node.daemon.reduction.ledger_view import ReductionLedger
from atoll.node.daemon.reduction.reduced_set import ReducedSet, SliceStore
from atoll.node.daemon.reduction.row_fetcher import RowFetcher
from atoll.node.daemon.rounds.types import PayloadHeld, ReductionPlanned, SetResolved
from atoll.protocols.errors import AtollError, CorruptFault, DecodeError, DiskFault
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.records import Entry, Reduction, ReductionFault
from atoll.protocols.ledger.reduction import Claim, Offer, OpeningAsk, cover, decode_ask, rules_of
from atoll.protocols.local.worker_messages import OpenReply, OpenRequest, ReduceReply, ReduceRequest
from atoll.protocols.run.arena import Span

log = logging.getLogger(__name__)

PATIENCE_ROUNDS = 1.0
MIN_PATIENCE_S = 3.0
"""Patience with reducers after a round closed here: this many round times, and at least so many seconds."""
RETRY_S = 1.0


class OpenRound:
    """One reduced round that is not final."""

    def __init__(self, state: reduction_machine.State) -> None:
        self.state = state
        self.closed_at: float | None = None
        self.impatient_at: float | None = None
        self.parts: dict[tuple[Digest, ...], tuple[EffectiveSlice, ...]] = {}
        """What counts in the sets that this node made."""


class ReductionCoordinator:
    """Runs the machines of all open reduced rounds. Implements `RoundReducer` and `SlicedSets`."""

    def __init__(
        self,
        context: RunContext,
        net: Network,
        spool: Path,
        *,
        queue: EventQueue,
        machines: Machines,
        worker: WorkerClient,
        guard: FaultGuard,
        payloads: PayloadFetcher,
        contributions: ContributionIndex,
        applied: Callable[[], Round],
        on_rows: Callable[[], None],
        rng: random.Random,
    ) -> None:
        """For a run that has `reduce`. `payloads` fetches the payloads of Reductions too.

        `applied` returns the newest round in the worker's Θ_final. `on_rows` is called when wanted rows are here.
        `rng` chooses the chunks to audit: reducers must not be able to foresee it.
        """
        assert context.spec.reduce is not None, "a run without `reduce` gets NoReduction"
        self._context = context
        self._net = net
        self._queue = queue
        self._machines = machines
        self._worker = worker
        self._guard = guard
        self._payloads = payloads
        self._contributions = contributions
        self._applied = applied
        self._on_rows = on_rows
        self.ledger = ReductionLedger(context.me, rules_of(context.spec), context.spec.reduce)
        self._rows = RowFetcher(
            net,
            self.ledger,
            payloads,
            spool / "rows",
            start_task=queue.start_task,
            on_fault=guard.blame,
            on_disk_fault=guard.on_disk_fault,
        )
        self._auditor = Auditor(
            net,
            self.ledger,
            spool,
            ask=worker.ask,
            publish=guard.publish,
            on_fault=guard.blame,
            rng=rng,
        )
        self._store = SliceStore(net, self.ledger, payloads, self._rows)
        self._rounds: dict[int, OpenRound] = {}
        self._reducing: set[int] = set()
        self._reported_faults: list[tuple[PeerId, ReductionFault]] = []
        payloads.subscribe(self._on_payload)
        net.answer_by(self._answer)

    # --- RoundReducer -----------------------------------------------------------------------------

    def is_reduced(self, number: int) -> bool:
        """Return whether reducers are known for a round, so that nobody reads its payloads as a whole."""
        return bool(self.ledger.plan(number).reducers)

    def add_entry(self, entry: Entry) -> None:
        """Record a lawful entry of the ledger."""
        known = self.ledger.add(entry)
        if isinstance(known, Offer):
            self._feed_offer(entry.body.round, known)
        elif isinstance(known, Claim):
            # A wrong Reduction taints those that continue it, so the machines of later rounds need it too.
            for number in [at for at in self._rounds if at >= entry.body.round]:
                self._feed(number, reduction_machine.ClaimSeen(known))
        elif isinstance(entry.body, ReductionFault) and self._auditor.add_report(entry.author, entry.body):
            self._reported_faults.append((entry.author, entry.body))

    def set_final(self, number: Round, names: tuple[Digest, ...]) -> None:
        """The final set of a round is known; it decides the reducers of a later round."""
        self.ledger.decide(number, names)

    def close_round(self, number: Round) -> None:
        """The round machine closed a reduced round: find out what counts in it."""
        if number in self._rounds:
            self._rounds[number].closed_at = self._context.now()
            self._feed(number, reduction_machine.Collected())

    def step(self) -> None:
        """Open rounds whose plan is known by now, lose patience with reducers, check reported faults."""
        last = self._machines.finality.last_final
        for number in [at for at in self._rounds if at <= last]:
            del self._rounds[number]
        # A final set names the reducers `gap` rounds later, so no plan can be known beyond that.
        for number in range(last + 1, last + 1 + self.ledger.spec.gap):
            if self.is_reduced(number) and number not in self._rounds:
                self._open(number)
        for number in list(self._rounds):
            self._lose_patience(number)
        for author, fault in self._reported_faults:
            if fault.round > last and self._worker.is_ready:
                self._queue.start_task(self._check_fault(author, fault), "fault")
        # A fault in a final round is moot. The others wait for a worker, which is what checks a proof.
        waits = not self._worker.is_ready
        self._reported_faults = [one for one in self._reported_faults if one[1].round > last and waits]

    # --- SlicedSets -------------------------------------------------------------------------------

    def find(self, number: Round, names: tuple[Digest, ...]) -> ReducedSet | None:
        """Return the set if it is folded slice by slice here; None if whole payloads give the same bits."""
        has_reduction = any(name in self.ledger.claims for name in names)
        # Without a Reduction all rows count raw, and a node that holds the whole payloads needs no slices.
        is_whole = all(self._contributions.is_held(entry) for entry, _, _ in self._contributions.find(names))
        if not has_reduction and (is_whole or not self.is_reduced(number)):
            return None
        return ReducedSet(
            number=number,
            names=names,
            parts_of=self._parts_of,
            fetch_part=self._fetch_part,
            store=self._store,
            worker=self._worker,
            guard=self._guard,
            log=self._context.log,
            applied=self._applied,
        )

    def forget(self, final: Round) -> None:
        """Stop fetching rows of rounds up to `final`."""
        self._rows.forget(final)

    def payloads(self, first: Round) -> set[Digest]:
        """Return the blobs of Reductions and fault proofs from round `first` on."""
        return self.ledger.reduced_payloads(first) | self._auditor.proofs(first)

    def forget_payloads(self, before: Round) -> set[Digest]:
        """Forget the rounds before `before`, which newer snapshots cover. Returns their blobs."""
        old = self.payloads(Round(0)) - self.payloads(before)
        self.ledger.forget(before)
        self._auditor.forget(before)
        try:
            self._rows.store.keep_only(self.ledger.entries.keys())
        except DiskFault as error:
            self._guard.on_disk_fault(error)
        return old

    def _parts_of(self, number: Round, names: tuple[Digest, ...]) -> tuple[EffectiveSlice, ...] | None:
        """Return what counts in each slice of a set: as our machine found it, else as the ledger alone says."""
        open_round = self._rounds.get(number)
        parts = open_round.parts.get(names) if open_round is not None else None
        return parts or self.ledger.parts(number, names)

    def _fetch_part(self, number: Round, part: EffectiveSlice) -> None:
        if part.reduced is not None:
            self._payloads.fetch(part.reduced.body, part.reduced.author)
        for offer in part.raw:
            if not self._rows.store.has(offer.entry, part.span):
                self._fetch_rows(number, offer, part.span)

    # --- the machines of open rounds --------------------------------------------------------------

    def _open(self, number: int) -> None:
        plan = self.ledger.plan(number)
        self._rounds[number] = OpenRound(reduction_machine.State(self.ledger.me, Round(number), plan))
        self._machines.feed_round(ReductionPlanned(Round(number), self._context.now()))
        # Faults before Reductions, so that a wrong one is never asked for.
        for entry in self._auditor.wrong:
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
        held = PayloadHeld(offer.entry, self.ledger.contribution(offer.entry).round, self._context.now())
        self._queue.post(lambda: self._machines.feed_round(held))

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
                    self._payloads.fetch(claim.body, claim.author)
                    self._queue.post(partial(self._check_claim, claim))  # perhaps it is held already
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
        known = SetResolved(number, entries, self._context.now())
        self._queue.post(lambda: self._machines.feed_round(known))
        reduced = sum(part.reduced is not None for part in parts)
        self._context.log.event("slices", round=number, reduced=reduced, raw=len(parts) - reduced)
        if is_first:
            self._queue.start_task(self._auditor.sample(parts), f"open {number}")

    def _lose_patience(self, number: int) -> None:
        """End the wait for reducers, then for rows that nobody gives: an author may be dead, or lie."""
        open_round, now = self._rounds[number], self._context.now()
        if open_round.closed_at is None:
            return
        spans, plan = reduction_machine.missing_slices(open_round.state), open_round.state.plan
        live = {*self._machines.round.members, self.ledger.me}
        is_coming = any(plan.reducers[plan.spans.index(span)] in live for span in spans)
        patience_s = max(MIN_PATIENCE_S, PATIENCE_ROUNDS * self._machines.round.train_s)
        if open_round.impatient_at is None and (not is_coming or now - open_round.closed_at >= patience_s):
            open_round.impatient_at = now
            self._feed(number, reduction_machine.PatienceOver())
        # One lease: by then a dead holder has left the membership, and nobody else is expected to serve the rows.
        gone_at = (open_round.impatient_at or now) + self._context.spec.pace.lease_s
        if now >= gone_at and not open_round.parts:
            self._give_up(number, open_round, now)

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
            self._queue.post(lambda: self._on_rows_held(number, offer, span))

        self._rows.fetch(number, offer, span, on_held)

    def _on_rows_held(self, number: int, offer: Offer, span: Span) -> None:
        self._feed(number, reduction_machine.RowsHeld(offer.entry, span))
        if self.ledger.plan(number).span_of(self.ledger.me) == span and number in self._rounds:
            self._report_held(offer)
        self._on_rows()

    def _on_payload(self, payload: Digest) -> None:
        """A payload is held or void: look at every Reduction that names it."""
        for claim in [claim for claim in self.ledger.claims.values() if claim.body.payload == payload]:
            self._check_claim(claim)

    def _check_claim(self, claim: Claim) -> None:
        if self._payloads.is_void(claim.body) and claim.entry not in self._auditor.wrong:
            self._on_wrong(claim.entry)
        elif self._payloads.is_held(claim.body):
            self._feed(claim.body.round, reduction_machine.ReductionHeld(claim.entry))

    # --- this node's slice ------------------------------------------------------------------------

    def _start_reducing(self, number: int, span: Span, offers: tuple[Offer, ...]) -> None:
        if number not in self._reducing:
            self._reducing.add(number)
            self._queue.start_task(self._reduce(number, span, offers), f"reduce {number}")

    async def _reduce(self, number: int, span: Span, offers: tuple[Offer, ...]) -> None:
        """Reduce and publish; again with the next worker if this one dies, until it is too late."""
        here, life = list[Offer](), -1
        while number in self._rounds and self.ledger.ours(number) is None:
            # In one life the worker reduces a round once, and repeats that reply. So the offers stay fixed for a
            # life: to claim rows that came later would be proven wrong.
            if life != self._worker.lives:
                here = [offer for offer in sorted(offers) if self._rows.has(offer, span)]
                life = self._worker.lives
            try:
                request = self._reduce_request(number, span, here)
                done = await self._worker.ask_until_saved(request, ReduceReply)
                if self._publish(number, span, here, done):
                    return
            except (DecodeError, CorruptFault):
                life = -1  # nothing was reduced, so other rows may be named
                for offer in offers:
                    self._rows.drop(offer, span)
            except AtollError as error:
                log.debug("reducing round %d: %s", number, error)
            await asyncio.sleep(RETRY_S)

    def _reduce_request(self, number: int, span: Span, offers: list[Offer]) -> ReduceRequest:
        before = self.ledger.newest_of_ours(number)
        return ReduceRequest(
            round=Round(number),
            span=span,
            raw=tuple(self._store.raw_member(offer, span) for offer in offers),
            roots=tuple(self.ledger.contribution(offer.entry).rows for offer in offers),
            previous=before.body.round if before else -1,
        )

    def _publish(self, number: int, span: Span, offers: list[Offer], done: ReduceReply) -> bool:
        """Return whether nothing is left to do: False if the disk refused the record. Raises DiskFault."""
        blob = self._net.add_blob(Path(done.path))
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
        return self._guard.publish(body) is not None

    # --- faults, and questions of others ----------------------------------------------------------

    async def _check_fault(self, author: PeerId, fault: ReductionFault) -> None:
        if await self._auditor.check(author, fault):
            self._context.log.event("reduction_wrong", round=fault.round, entry=fault.reduction.hex())
            self._on_wrong(fault.reduction)

    def _on_wrong(self, entry: Digest) -> None:
        """A Reduction is wrong: raw rows take its place, and no set that is made of it is voted for."""
        self._auditor.wrong |= {entry}
        for number in list(self._rounds):
            self._feed(number, reduction_machine.Wrong(entry))
        for doubted in self.ledger.tainted([entry]):
            self._machines.feed_finality(ReductionRefuted(doubted))

    async def _answer(self, peer: PeerId, question: bytes) -> bytes:
        ask = decode_ask(question)
        if not isinstance(ask, OpeningAsk):
            return self._rows.answer(ask)
        claim = self.ledger.claims.get(ask.reduction)
        if claim is None or claim.author != self.ledger.me or not claim.body.span.holds(ask.chunk):
            return b""
        # The worker forgets how it reduced a round once the round is final.
        if claim.body.round <= self._applied() or not self._auditor.may_ask(peer, claim):
            return b""
        try:
            opened = await self._worker.ask(OpenRequest(claim.body.round, ask.chunk), OpenReply)
        except AtollError as error:
            log.debug("an opening for …%s: %s", peer[-6:], error)
            return b""
        return opened.opening
