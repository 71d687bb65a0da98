"""This node's part in reduced rounds: which are, when their sets are ready, our own slice, and what others ask.

Each open round has a machine of its own (`reduce/member.py`); here its actions are performed and its events made.
Whom a round waits for and when it closes is the round machine's, as in all rounds: it hears of a contribution as
held when the rows are here that this node reduces, and of the set (SetKnown) when all that counts is here.
"""

import asyncio
import logging
import random
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from atoll.node.daemon.consensus.types import Doubted
from atoll.node.daemon.coordinator.contribution_sets import AskOf
from atoll.node.daemon.coordinator.interfaces import Network
from atoll.node.daemon.coordinator.payload_fetcher import Named, Payloads
from atoll.node.daemon.reduction import machine as member
from atoll.node.daemon.reduction.audit import Openings
from atoll.node.daemon.reduction.effective_set import Effective
from atoll.node.daemon.reduction.ledger_view import ReducedSets
from atoll.node.daemon.reduction.row_fetcher import SliceSources
from atoll.node.daemon.rounds.types import PayloadHeld, Planned, SetKnown
from atoll.node.ipc.worker_process import WorkerDied
from atoll.protocols.errors import AtollError, CorruptFault, DecodeError, DiskFault, Superseded
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.records import Entry, Reduction, ReductionFault
from atoll.protocols.ledger.reduction import Claim, Offer, OpeningAsk, cover, decode_ask, rules_of
from atoll.protocols.local.worker_messages import (
    Counted,
    Member,
    OpenReply,
    OpenRequest,
    ReduceReply,
    ReduceRequest,
    Slice,
)
from atoll.protocols.run.arena import Span

if TYPE_CHECKING:
    from atoll.node.daemon.coordinator.driver import Driver

A = TypeVar("A")
log = logging.getLogger(__name__)

PATIENCE_ROUNDS, MIN_PATIENCE_S = 1.0, 3.0
"""So long after a round closed here its reducers are waited for."""
LOOK_S = 0.2
RETRY_S = 1.0


class OpenRound:
    """One reduced round that is not final."""

    def __init__(self, state: member.State) -> None:
        self.state = state
        self.settled_at: float | None = None
        self.impatient_at: float | None = None
        self.parts: dict[tuple[Digest, ...], tuple[Effective, ...]] = {}
        """What counts in the sets that this node made."""


class Reductions:
    """Runs the machines of all open reduced rounds."""

    def __init__(
        self, driver: "Driver", net: Network, payloads: Payloads, spool: Path, luck: random.Random
    ) -> None:
        """For a run that has `reduce`. `payloads`: of Reductions too."""
        assert driver.spec.reduce is not None
        self._driver, self._net, self._payloads = driver, net, payloads
        self.sets = ReducedSets(driver.me, rules_of(driver.spec), driver.spec.reduce)
        refuse = (driver.blame, driver.disk_trouble)
        self._sources = SliceSources(net, self.sets, payloads, spool / "rows", *refuse)
        self._openings = Openings(net, self.sets, spool, driver.ask, driver.publish, driver.blame, luck)
        self._rounds: dict[int, OpenRound] = {}
        self._reducing: set[int] = set()
        self._faults: list[tuple[PeerId, ReductionFault]] = []
        net.answer_by(self._answer)

    # --- what happens ---------------------------------------------------------------------------

    def note(self, entry: Entry) -> None:
        """The ledger took an entry."""
        known = self.sets.note(entry)
        if isinstance(known, Offer):
            self._offered(entry.body.round, known)
        elif isinstance(known, Claim):
            for number in [at for at in self._rounds if at >= entry.body.round]:
                self._tell(number, member.ClaimSeen(known))
        elif isinstance(entry.body, ReductionFault) and self._openings.note(entry.author, entry.body):
            self._faults.append((entry.author, entry.body))

    def decided(self, number: Round, names: tuple[Digest, ...]) -> None:
        """A final set is known: it decides who reduces a later round."""
        self.sets.decide(number, names)

    def step(self) -> None:
        """Time passed: open rounds whose plan is known by now, lose patience with reducers, check faults."""
        last = self._driver.finality.last_final
        for number in [at for at in self._rounds if at <= last]:
            del self._rounds[number]
        for number in range(last + 1, last + 1 + self.sets.spec.gap):
            if self.sets.plan(number).reducers and number not in self._rounds:
                self._open(number)
        for number in list(self._rounds):
            self._look(number)
        for author, fault in self._faults:
            if fault.round > last and self._driver.worker_ready:
                self._driver.start_task(self._hear(author, fault), "fault")
        self._faults = [one for one in self._faults if one[1].round > last and not self._driver.worker_ready]

    def settle(self, number: Round) -> None:
        """The round machine closed a reduced round."""
        if number in self._rounds:
            self._rounds[number].settled_at = self._driver.now()
            self._tell(number, member.Collected())

    def forget(self, final: Round) -> None:
        """The worker holds a final round: what was wanted up to it is not needed."""
        self._sources.forget(final)

    def forget_payloads(self, before: Round) -> set[Digest]:
        """Newer snapshots cover the rounds before this one. Returns their blobs."""
        old = self.payloads(Round(0)) - self.payloads(before)
        self.sets.forget(before)
        self._openings.forget(before)
        try:
            self._sources.shelf.keep_only(self.sets.entries.keys())
        except DiskFault as error:
            self._driver.disk_trouble(error)
        return old

    def payloads(self, first: Round) -> set[Digest]:
        """Of all Reductions from this round on, and proofs that some of them are wrong."""
        return self.sets.reduced_payloads(first) | self._openings.proofs(first)

    # --- sets -------------------------------------------------------------------------------------

    def is_sliced(self, number: int, names: tuple[Digest, ...]) -> bool:
        """Whether a set is made of slices here: else whole payloads give the same bits."""
        return any(name in self.sets.claims for name in names) or (
            bool(self.sets.plan(number).reducers)
            and not all(one.held for one in self._driver.contributions.known(names))
        )

    def counted(self, number: int, names: tuple[Digest, ...]) -> tuple[Counted, ...] | None:
        """What of ours counts in a final set of slices. None: a Reduction covers what the ledger lacks."""
        mine = [o for o in self.sets.offers(number) if o.author == self.sets.me]
        claims = [self.sets.claims[name] for name in names if name in self.sets.claims]
        reduced = [
            Counted(claim.body.payload, (), Round(number)) for claim in claims if claim.author == self.sets.me
        ]
        if not mine:
            return tuple(reduced)
        parts = self.sets.parts(number, names)
        if parts is None:
            return None
        spans = tuple(part.span for part in parts if self.sets.has_ours(part))
        at = Round(number)
        return (*(Counted(self.sets.contribution(o.entry).payload, spans, at) for o in mine), *reduced)

    def slices(self, number: int, names: tuple[Digest, ...]) -> tuple[Slice, ...] | None:
        """A set as the worker wants it; None while not all is here."""
        parts = self._parts(number, names)
        return tuple(map(self._slice, parts)) if parts and all(map(self._is_here, parts)) else None

    def want(self, number: int, names: tuple[Digest, ...]) -> None:
        """Get what is missing of a set."""
        parts = self._parts(number, names)
        if parts is None:
            self._net.sync_soon()
        for part in parts or ():
            if part.reduced is not None:
                self._payloads.want(self._driver.group, named_by(part.reduced), part.reduced.author)
            for offer in part.raw:
                if not self._sources.shelf.has(offer.entry, part.span):
                    self._want_rows(number, offer, part.span)

    def _parts(self, number: int, names: tuple[Digest, ...]) -> tuple[Effective, ...] | None:
        open_round = self._rounds.get(number)
        parts = open_round.parts.get(names) if open_round is not None else None
        return parts or self.sets.parts(number, names)

    async def ask(self, number: int, names: tuple[Digest, ...], ask_of: AskOf, kind: type[A]) -> A:
        """Ask the worker for work on a set of slices, as soon as all of it is here.

        Raises WorkerDied, Superseded.
        """
        life = self._driver.lives
        while True:
            slices = self.slices(number, names)
            if slices is not None:
                try:
                    return await self._driver.ask_until_saved(ask_of((), slices), kind)
                except (DecodeError, CorruptFault) as error:
                    self._driver.log.event("slices_damaged", round=number, error=error.line())
                    self._mend(number, names)
            self.want(number, names)
            await asyncio.sleep(LOOK_S)
            if life != self._driver.lives:
                raise WorkerDied("the worker that was asked is gone")
            if number <= self._driver.finals.applied:
                raise Superseded(f"round {number} is final already")

    def _slice(self, part: Effective) -> Slice:
        reduced: tuple[Member, ...] = ()
        if part.reduced is not None:
            body, path = part.reduced.body, str(self._net.blob_path(part.reduced.body.payload))
            reduced = (Member(part.reduced.entry, part.reduced.author, part.weight, body.payload, path),)
        return Slice(
            part.span, reduced, tuple(self._raw(o, part.span) for o in part.raw), self.sets.has_ours(part)
        )

    def _raw(self, offer: Offer, span: Span) -> Member:
        payload = self.sets.contribution(offer.entry).payload
        path = str(self._sources.shelf.path(offer.entry, span))
        return Member(offer.entry, offer.author, offer.weight, payload, path)

    def _is_here(self, part: Effective) -> bool:
        reduced = part.reduced is None or self._payloads.held(named_by(part.reduced))
        return reduced and all(self._sources.shelf.has(offer.entry, part.span) for offer in part.raw)

    def _mend(self, number: int, names: tuple[Digest, ...]) -> None:
        """Something on disk cannot be read: get all of the set again."""
        for part in self.sets.parts(number, names) or ():
            for offer in part.raw:
                self._sources.damaged(offer, part.span)
            if part.reduced is not None:
                self._driver.delete_blob(part.reduced.body.payload)

    # --- the machines -------------------------------------------------------------------------------

    def _open(self, number: int) -> None:
        self._rounds[number] = OpenRound(member.State(self.sets.me, Round(number), self.sets.plan(number)))
        self._driver.feed_round(Planned(Round(number), self._driver.now()))
        for entry in self._openings.wrong:
            self._tell(number, member.Wrong(entry))
        for claim in list(self.sets.claims.values()):
            if claim.body.round <= number:
                self._tell(number, member.ClaimSeen(claim))
        for offer in self.sets.offers(number):
            self._offered(number, offer)

    def _offered(self, number: Round | int, offer: Offer) -> None:
        if number not in self._rounds:
            return
        self._tell(number, member.OfferSeen(offer))
        if self.sets.plan(number).span_of(self.sets.me) is None:
            self._enough(offer)

    def _enough(self, offer: Offer) -> None:
        """All that this node needs of a contribution before its round closes is here."""
        held = PayloadHeld(offer.entry, self.sets.contribution(offer.entry).round, self._driver.now())
        self._driver.post(lambda: self._driver.feed_round(held))

    def _tell(self, number: int, event: member.Event) -> None:
        open_round = self._rounds.get(number)
        if open_round is None:
            return
        open_round.state, actions = member.step(open_round.state, event)
        for action in actions:
            match action:
                case member.FetchRows(offer, span):
                    self._want_rows(number, offer, span)
                case member.FetchReduction(claim):
                    self._want_payload(claim)
                case member.ReduceSlice(span, offers):
                    self._start_reducing(number, span, offers)
                case member.FoldSlices(parts, entries):
                    self._set_known(open_round, parts, entries)

    def _set_known(self, open_round: OpenRound, parts: tuple[Effective, ...], entries: tuple[Digest, ...]) -> None:
        number, now, first = open_round.state.number, self._driver.now(), not open_round.parts
        open_round.parts[entries] = parts
        self._driver.post(lambda: self._driver.feed_round(SetKnown(number, entries, now)))
        reduced = sum(part.reduced is not None for part in parts)
        self._driver.log.event("slices", round=number, reduced=reduced, raw=len(parts) - reduced)
        if first:
            self._driver.start_task(self._openings.sample(parts), f"open {number}")

    def _look(self, number: int) -> None:
        """Patience with reducers, then with rows that nobody gives: an author may be dead, or lie."""
        open_round, now = self._rounds[number], self._driver.now()
        if open_round.settled_at is None:
            return
        spans, plan = member.missing_slices(open_round.state), open_round.state.plan
        live = {*self._driver.round.members, self.sets.me}
        coming = any(plan.reducers[plan.spans.index(span)] in live for span in spans)
        patience_s = max(MIN_PATIENCE_S, PATIENCE_ROUNDS * self._driver.round.train_s)
        if open_round.impatient_at is None and (not coming or now - open_round.settled_at >= patience_s):
            open_round.impatient_at = now
            self._tell(number, member.PatienceOver())
        gone_at = (open_round.impatient_at or now) + self._driver.spec.pace.lease_s
        if now >= gone_at and not open_round.parts:
            self._give_up(number, open_round, now)

    def _give_up(self, number: int, open_round: OpenRound, now: float) -> None:
        """Do without Reductions whose payload nobody gives; if it is not that, without rows that nobody gives."""
        lost = member.missing_payloads(open_round.state)
        if lost:
            open_round.impatient_at = now  # the rows that are needed instead have as much time
        else:
            offers = (offer for offer in self.sets.offers(number) if offer.author != self.sets.me)
            lost = tuple(offer.entry for offer in offers if offer.entry not in open_round.state.gone)
        for entry in lost:
            self._tell(number, member.Gone(entry))

    def _want_rows(self, number: int, offer: Offer, span: Span) -> None:
        def heard() -> None:
            self._driver.post(lambda: self._rows_here(number, offer, span))

        self._sources.want_rows(self._driver.group, number, offer, span, heard)

    def _rows_here(self, number: int, offer: Offer, span: Span) -> None:
        self._tell(number, member.RowsHeld(offer.entry, span))
        if self.sets.plan(number).span_of(self.sets.me) == span and number in self._rounds:
            self._enough(offer)
        self._driver.finals.step()

    def _want_payload(self, claim: Claim) -> None:
        self._payloads.want(self._driver.group, named_by(claim), claim.author)
        self._driver.post(lambda: self._look_at(claim))

    def payload_settled(self, payload: Digest) -> None:
        """It is held or void, as what some record says that it is."""
        for claim in [claim for claim in self.sets.claims.values() if claim.body.payload == payload]:
            self._look_at(claim)

    def _look_at(self, claim: Claim) -> None:
        number, named = claim.body.round, named_by(claim)
        if self._payloads.is_void(named) and claim.entry not in self._openings.wrong:
            self._found_wrong(claim.entry)
        elif self._payloads.held(named):
            self._tell(number, member.ReductionHeld(claim.entry))

    # --- our own slice ------------------------------------------------------------------------------

    def _start_reducing(self, number: int, span: Span, offers: tuple[Offer, ...]) -> None:
        if number not in self._reducing:
            self._reducing.add(number)
            self._driver.start_task(self._reduce(number, span, offers), f"reduce {number}")

    async def _reduce(self, number: int, span: Span, offers: tuple[Offer, ...]) -> None:
        """Reduce and publish; again with the next worker where this one dies, until it is too late.

        In one life the worker reduces once: what came since is not in what it gives when it is asked again.
        """
        here, life = list[Offer](), -1
        while number in self._rounds and self.sets.ours(number) is None:
            if life != self._driver.lives:
                here = [offer for offer in sorted(offers) if self._sources.has_rows(offer, span)]
                life = self._driver.lives
            try:
                done = await self._driver.ask_until_saved(self._reduce_ask(number, span, here), ReduceReply)
                if self._publish(number, span, here, done):
                    return
            except (DecodeError, CorruptFault):
                life = -1  # nothing was made
                for offer in offers:
                    self._sources.damaged(offer, span)
            except AtollError as error:
                log.debug("reducing round %d: %s", number, error)
            await asyncio.sleep(RETRY_S)

    def _reduce_ask(self, number: int, span: Span, offers: list[Offer]) -> ReduceRequest:
        before = self.sets.newest_of_ours(number)
        roots = tuple(self.sets.contribution(offer.entry).rows for offer in offers)
        raw = tuple(self._raw(offer, span) for offer in offers)
        return ReduceRequest(Round(number), span, raw, roots, before.body.round if before else -1)

    def _publish(self, number: int, span: Span, offers: list[Offer], done: ReduceReply) -> bool:
        """Whether there is nothing more to do: False where the disk refused the record. Raises DiskFault."""
        blob = self._net.add_blob(Path(done.path))
        if blob != done.payload or number not in self._rounds:
            return True
        covered, more, members = cover(offers, self.sets.plan(number))
        before = self.sets.ours(done.previous) if done.previous >= 0 else None
        words = (covered, more, members, done.payload, done.rows, done.kept)
        body = Reduction(Round(number), span, *words, before.entry if before else b"")
        return self._driver.publish(body) is not None

    # --- faults, and what others ask ------------------------------------------------------------------

    async def _hear(self, author: PeerId, fault: ReductionFault) -> None:
        if await self._openings.hear(author, fault):
            self._driver.log.event("reduction_wrong", round=fault.round, entry=fault.reduction.hex())
            self._found_wrong(fault.reduction)

    def _found_wrong(self, entry: Digest) -> None:
        self._openings.wrong |= {entry}
        for number in list(self._rounds):
            self._tell(number, member.Wrong(entry))
        for doubted in self.sets.tainted([entry]):
            self._driver.feed_finality(Doubted(doubted))

    async def _answer(self, peer: PeerId, question: bytes) -> bytes:
        ask = decode_ask(question)
        if not isinstance(ask, OpeningAsk):
            return self._sources.rows_for(ask)
        claim = self.sets.claims.get(ask.reduction)
        if claim is None or claim.author != self.sets.me or not claim.body.span.holds(ask.chunk):
            return b""
        if claim.body.round <= self._driver.finals.applied or not self._openings.may_ask(peer, claim):
            return b""
        try:
            opened = await self._driver.ask(OpenRequest(claim.body.round, ask.chunk), OpenReply)
        except AtollError as error:
            log.debug("an opening for …%s: %s", peer[-6:], error)
            return b""
        return opened.opening


def named_by(claim: Claim) -> Named:
    """What a Reduction says that its payload is."""
    body = claim.body
    return Named(body.payload, body.round, rows=body.rows, slice=(body.span,))
