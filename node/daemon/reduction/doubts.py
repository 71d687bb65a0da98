"""Which Reductions this node does not believe: proven wrong, illegal, of a liar, silent, or built on one of these.

A doubted Reduction counts as if it had not been written: its slice is raw, and this node names it in no proposal.
What is final stays final, so a silent one that a final set holds is believed again.

A proven liar is never believed again. A reducer that was reached and stays silent may be one, which does not open
what it lied about. It is *distrusted*, for some rounds at first and twice as long each time. One that cannot be
reached may just be gone, so only that Reduction is doubted.

An honest one whose worker died opens the same chunk later, which a liar never can. So it is asked again, and
believed at once.
"""

from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from atoll.node.daemon.reduction.audit import Outcome, ReducerAuditor
from atoll.node.daemon.reduction.complaints import Complaints
from atoll.node.daemon.reduction.effective_set import EffectiveSlice, tainted
from atoll.node.daemon.reduction.fault_reports import FaultReports
from atoll.node.daemon.reduction.ledger_view import ReductionLedger
from atoll.node.daemon.reduction.places import BackOff, longer
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.records import ReductionFault, Unanswered
from atoll.protocols.ledger.reduction import Claim

W = TypeVar("W", ReductionFault, Unanswered)
DISTRUST_ROUNDS = 64
"""A liar that opens all but one chunk would lie in every fourth round if this were 4 rounds at first."""
MOST_DOUBLINGS = 6
WAITING_KEPT = 64
"""Complaints of one author, and its reports of faults, that wait for their Reductions or rounds: the newest."""


@dataclass(kw_only=True)
class Doubts:
    """Audits, reported faults and complaints of one run, and what follows from them."""

    ledger: ReductionLedger
    auditor: ReducerAuditor
    reports: FaultReports
    complaints: Complaints
    start_task: Callable[[Coroutine[Any, Any, None], str], object]
    last_final: Callable[[], int]
    on_doubt: Callable[[Digest, frozenset[Digest], bool], None]
    """Called with a doubted Reduction, all that are refuted with it, and whether by a proof."""
    on_cleared: Callable[[Digest, frozenset[Digest]], None]
    """Called with one that is believed again, and with all that are believed again with it."""
    on_event: Callable[[str, Claim], None]
    """Called with `reduction_wrong` or `reduction_silent`, for the event log."""
    _distrusted: dict[PeerId, BackOff] = field(default_factory=dict)
    _origins: dict[PeerId, Claim] = field(default_factory=dict)
    """The Reduction by which each of them is distrusted."""
    _unopened: dict[Digest, tuple[int, bool]] = field(default_factory=dict)
    """The chunk of a Reduction that its reducer did not open, and whether it was reached."""
    _asking: set[Digest] = field(default_factory=set)
    """Reductions whose reducers are asked again now."""
    _liars: set[PeerId] = field(default_factory=set)
    _refuted: set[Digest] = field(default_factory=set)
    faults: dict[PeerId, dict[Digest, ReductionFault]] = field(default_factory=dict)
    """Reported faults that wait for their round, their Reduction or a worker, which is what checks a proof."""
    _checking: set[PeerId] = field(default_factory=set)
    """Authors of whose reports one is being checked."""
    unheard: dict[PeerId, dict[Digest, Unanswered]] = field(default_factory=dict)
    """Complaints that were not looked at, and those about Reductions that are not known yet."""

    @property
    def bad(self) -> frozenset[Digest]:
        """The Reductions that are doubted by themselves, and not for what they continue."""
        return self.reports.wrong | frozenset(self.complaints.silent)

    def distrusted(self, number: int, end: int) -> dict[PeerId, int]:
        """Return the reducers that are not believed in round `number`, with the last such round; liars: `end`."""
        silent = {peer: each.until for peer, each in self._distrusted.items() if each.until >= number}
        return {**silent, **dict.fromkeys(self._liars, end)}

    def add_claim(self, claim: Claim) -> None:
        """Doubt a new Reduction of a liar or a silent reducer, and one that continues what is doubted."""
        distrust = self._distrusted.get(claim.author)
        if claim.author in self._liars:
            self.condemn(claim.entry)
        elif distrust is not None and claim.body.round <= distrust.until:
            self._silence(claim.entry)
            self.start_task(self._ask_again(self._origins[claim.author]), "opening")
        elif claim.body.previous in self._refuted:
            self._refuted.add(claim.entry)
            self.on_doubt(claim.entry, frozenset([claim.entry]), False)

    def add_fault(self, author: PeerId, fault: ReductionFault) -> None:
        """Check a reported fault once its Reduction is known and its round open."""
        _add(self.faults.setdefault(author, {}), fault)

    def add_complaint(self, author: PeerId, body: Unanswered) -> None:
        """Look at a complaint at the next step."""
        _add(self.unheard.setdefault(author, {}), body)

    def forget_author(self, author: PeerId) -> None:
        """Forget what an author said that the ledger let go of, but for what was proven."""
        self.faults.pop(author, None)
        self.unheard.pop(author, None)
        self.reports.forget_author(author)

    def sample(self, number: Round, parts: tuple[EffectiveSlice, ...]) -> None:
        """Audit a round's Reductions."""
        self.start_task(self.auditor.sample(parts), f"open {number}")

    def step(self, has_worker: bool) -> None:
        """Check `faults` and `unheard`. A fault in a final round changes its author's later Reductions only."""
        last = self.last_final()
        if has_worker:
            for author, reports in self.faults.items():
                self._check_next(author, reports, last)
        self.faults = {author: reports for author, reports in self.faults.items() if reports}
        for author, complaints in self.unheard.items():
            self._hear(author, complaints, last)
        self.unheard = {author: complaints for author, complaints in self.unheard.items() if complaints}

    def _check_next(self, author: PeerId, reports: dict[Digest, ReductionFault], last: int) -> None:
        """Begin to check one report of an author, if there is one that can be checked."""
        gap = self.ledger.spec.gap
        for entry, fault in list(reports.items()):
            # Old proofs are gone with their rounds' payloads, so after a restart only recent ones are asked for.
            if fault.round < last + 1 - gap:
                self.reports.add_report(author, reports.pop(entry))  # so that its proof goes with its round
            # A check fetches a blob. Anybody can make up a Reduction, and write one about any round.
            elif author not in self._checking and fault.round <= last + gap and self.ledger.find_claim(entry):
                del reports[entry]
                if self.reports.add_report(author, fault):
                    self._checking.add(author)
                    self.start_task(self._check_fault(author, fault), "fault")

    def _hear(self, author: PeerId, complaints: dict[Digest, Unanswered], last: int) -> None:
        for entry, body in list(complaints.items()):
            claim = self.ledger.claims.get(entry)
            # A complaint may arrive before the Reduction, in another feed; it waits until the round is final.
            if claim is not None or body.round <= last:
                del complaints[entry]
                if claim is not None and body.round > last and self.complaints.add(author, body, claim):
                    self.start_task(self._check_complaint(author, claim, body.chunk), "complaint")

    def condemn(self, entry: Digest) -> None:
        """A Reduction is wrong for good: proven, with an illegal payload, or of a liar."""
        self.reports.wrong |= {entry}
        self._doubt(entry)

    def on_unanswered(self, claim: Claim, chunk: int, was_reached: bool) -> None:
        """Complain about a reducer, unless the round is final: its worker has forgotten by then how it reduced."""
        if claim.body.round > self.last_final():
            before = self._unopened.get(claim.entry, (chunk, False))
            self._unopened[claim.entry] = (chunk, was_reached or before[1])
            self.complaints.note_unanswered(claim, chunk)

    def on_silent(self, entry: Digest) -> None:
        """A Reduction that nobody is known to have opened counts no more than a wrong one."""
        claim = self.ledger.claims[entry]
        # Before the doubt itself, so that the event log names the cause first.
        self.on_event("reduction_silent", claim)
        self._doubt(entry)
        if self._unopened[entry][1]:
            self._distrust(claim)
        self.start_task(self._ask_again(claim), "opening")

    def _distrust(self, claim: Claim) -> None:
        before = self._distrusted.get(claim.author)
        if before is not None and claim.body.round <= before.until:
            return
        # Its Reductions of the rounds that were planned meanwhile belong to this silence, and do not double it.
        first = claim.body.round + 1
        self._origins[claim.author] = claim
        self._distrusted[claim.author] = longer(before, first, DISTRUST_ROUNDS, MOST_DOUBLINGS)
        for other in list(self.ledger.claims.values()):
            if other.author == claim.author and other.body.round >= first:
                self._silence(other.entry)

    def _silence(self, entry: Digest) -> None:
        # Silent and not wrong: it counts again if the others trust it and a final set holds it.
        self.complaints.silent.add(entry)
        self._doubt(entry)

    def acquit(self, names: tuple[Digest, ...]) -> None:
        """These Reductions are final. What was silent among them, and what continues it, counts again."""
        for author in [author for author, claim in self._origins.items() if claim.entry in names]:
            names += self._forgive(author)
        self._believe(names)

    def _forgive(self, author: PeerId) -> tuple[Digest, ...]:
        """End the distrust of a reducer. Returns its Reductions that nothing else is held against."""
        del self._origins[author], self._distrusted[author]
        silent = [entry for entry in self.complaints.silent if self.complaints.has_answered(entry)]
        return tuple(entry for entry in silent if self.ledger.claims[entry].author == author)

    def _believe(self, names: Iterable[Digest]) -> None:
        for entry in names:
            if entry in self.complaints.silent:
                self.complaints.silent.discard(entry)
                # What is doubted for another reason stays so.
                cleared = tainted(self.ledger.claims, [entry]) - tainted(self.ledger.claims, self.bad)
                self._refuted -= cleared
                if entry in cleared:
                    self.on_cleared(entry, cleared)

    def forget(self, before: int) -> None:
        """Forget the rounds before this one, whose payloads are dropped."""
        self.auditor.forget()
        self.reports.forget(before)
        self.complaints.forget(before)
        self.complaints.silent &= self.ledger.claims.keys()
        self._refuted &= self.ledger.claims.keys()
        self._unopened = {entry: one for entry, one in self._unopened.items() if entry in self.ledger.claims}

    def _doubt(self, entry: Digest, is_proven: bool = False) -> None:
        refuted = tainted(self.ledger.claims, [entry])
        self._refuted |= refuted
        self.on_doubt(entry, refuted, is_proven)

    async def _check_fault(self, author: PeerId, fault: ReductionFault) -> None:
        try:
            is_wrong = await self.reports.check(author, fault)
        finally:
            self._checking.discard(author)
        if not is_wrong:
            return
        self._doubt(fault.reduction, is_proven=True)
        claim = self.ledger.claims.get(fault.reduction)
        if claim is not None:
            self.on_event("reduction_wrong", claim)
            self._on_liar(claim.author)

    def _on_liar(self, author: PeerId) -> None:
        """A reducer was proven to lie: what it reduced since, and what it will reduce, counts as wrong."""
        self._liars.add(author)
        theirs = [claim for claim in self.ledger.claims.values() if claim.author == author]
        for claim in theirs:
            if claim.body.round > self.last_final() and claim.entry not in self.reports.wrong:
                self.condemn(claim.entry)

    async def _ask_again(self, claim: Claim) -> None:
        """Believe a Reduction, and its reducer, once what was not opened of it is."""
        # One at a time: an author may write many Reductions, and each makes this node ask.
        if claim.entry in self._asking or claim.entry not in self._unopened:
            return  # one that was forgotten, as its payload, cannot be opened any more
        self._asking.add(claim.entry)
        try:
            opens = await self.auditor.opens_now(claim, self._unopened[claim.entry][0])
        finally:
            self._asking.discard(claim.entry)
        if opens:
            self.complaints.note_opened(claim.entry)
            is_origin = self._origins.get(claim.author) == claim
            self._believe((claim.entry, *(self._forgive(claim.author) if is_origin else ())))

    async def _check_complaint(self, author: PeerId, claim: Claim, chunk: int) -> None:
        if await self.auditor.open(claim, chunk) == Outcome.ANSWERED:
            self.complaints.note_answered(author)


def _add(waiting: dict[Digest, W], body: W) -> None:
    """Let one more record of an author wait; of several about one Reduction the first counts."""
    waiting.setdefault(body.reduction, body)
    if len(waiting) > WAITING_KEPT:
        del waiting[next(iter(waiting))]
