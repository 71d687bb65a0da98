"""The ledger's entries about reduced rounds: the reducers, the contributions, the Reductions. No I/O.

A set names contributions and Reductions. What counts in it follows from the set alone, once the ledger has all
contributions that its Reductions cover.

Of an author that signed two histories a feed holds one, and a set may name the other. Such entries are *orphans*:
they count where a set names them, and in nothing that this node makes itself.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, product

from atoll.node.daemon.certificates.reducers import Decided, ReducerHistory
from atoll.node.daemon.reduction import places
from atoll.node.daemon.reduction.effective_set import (
    EffectiveSlice,
    effective_slices,
    entries_of,
    one_per_author,
)
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.records import Entry, PlannedContribution, Reduction, SlicedContribution
from atoll.protocols.ledger.reduction import Claim, Offer, ReductionRules, covered_by
from atoll.protocols.run.slices import ReduceSpec, SlicePlan, all_gather, plan_of

REMEMBERED = 128
"""Rounds for which plans and Reductions stay known after their payloads are dropped: later ones continue them."""
_READINGS = 64
"""Ways to choose between histories that are tried: enough for six authors of one round that signed two."""


@dataclass(slots=True)
class ReductionLedger:
    """Contributions and Reductions by round, and the plans that follow from final sets."""

    me: PeerId
    rules: ReductionRules
    spec: ReduceSpec
    entries: dict[Digest, Entry] = field(default_factory=dict)
    """Contributions and Reductions."""
    claims: dict[Digest, Claim] = field(default_factory=dict)
    """Reductions by entry id, at most one for each author and round: the first in the author's feed."""
    orphans: dict[Digest, Entry] = field(default_factory=dict)
    """Contributions and Reductions that no feed here holds."""
    _claimed: set[tuple[PeerId, int]] = field(default_factory=set)
    _offers: dict[int, dict[Digest, Offer]] = field(default_factory=dict)
    _plans: dict[int, SlicePlan] = field(default_factory=dict)
    _misses: dict[PeerId, places.BackOff] = field(default_factory=dict)
    _decided: dict[int, Decided] = field(default_factory=dict)

    def add(self, entry: Entry) -> Offer | Claim | None:
        """Record an entry. Returns the contribution or the Reduction that it is; None if it does not count."""
        match entry.body:
            case SlicedContribution(number):
                offer = Offer(entry.id, entry.author, entry.body.weight, entry.seq)
                self._offers.setdefault(number, {})[entry.id] = offer
                self.entries[entry.id] = entry
                return offer
            case Reduction(number) if (entry.author, number) not in self._claimed:
                self._claimed.add((entry.author, number))
                # A second Reduction of one author and round would let it change a set that was folded already.
                claim = self.claims[entry.id] = Claim(entry.id, entry.author, entry.body)
                self.entries[entry.id] = entry
                return claim
        return None

    def add_orphan(self, entry: Entry) -> None:
        """Record an entry that a set may name, though no feed here holds it."""
        if isinstance(entry.body, SlicedContribution | Reduction):
            self.orphans[entry.id] = entry

    def find_claim(self, name: Digest) -> Claim | None:
        """Return a Reduction that a set may name; None if the name is none."""
        entry = self.orphans.get(name)
        if entry is None or not isinstance(entry.body, Reduction):
            return self.claims.get(name)
        return Claim(entry.id, entry.author, entry.body)

    def plan(self, number: int) -> SlicePlan:
        """Return slices and reducers of a round; without reducers while the set that decides them is not known."""
        return self._plans.get(number) or all_gather(self.rules.chunks)

    def offers(self, number: int) -> tuple[Offer, ...]:
        """Return the contributions to a round that count, by rising entry id."""
        return one_per_author(self._offers.get(number, {}).values())

    def contribution(self, entry: Digest) -> SlicedContribution:
        """Return the record of a contribution."""
        body = (self.entries.get(entry) or self.orphans[entry]).body
        assert isinstance(body, SlicedContribution)
        return body

    def decide(self, number: int, names: Collection[Digest]) -> Round:
        """Derive the reducers of a later round, which is returned, from the final set of this one.

        Every final set counts once, in order: who is passed over depends on the sets before.
        """
        found = [entry for name in names if (entry := self.entries.get(name) or self.orphans.get(name))]
        works = [entry for entry in found if isinstance(entry.body, SlicedContribution)]
        authors = frozenset(entry.author for entry in works)
        # Less than a third of the members lie about what they knew.
        is_known = 3 * sum(isinstance(entry.body, PlannedContribution) for entry in works) >= 2 * len(works)
        # A reducer without a Reduction in the set was dead, slow, silent or wrong.
        present = {entry.author for entry in found if isinstance(entry.body, Reduction)}
        reducers, gap = self.plan(number).reducers, self.spec.gap
        self._misses = places.after(self._misses, number, reducers, present, gap, is_known=is_known)
        absent, decided = places.passed_over(self._misses, number), Round(number + self.spec.gap)
        self._add_plan(Decided(decided, tuple(sorted(authors)), tuple(sorted(absent))))
        # A summary of the rounds so far needs no more: older plans have led to misses, or to none.
        self._decided = {at: each for at, each in self._decided.items() if at > number}
        return decided

    def _add_plan(self, found: Decided) -> None:
        authors, absent = frozenset(found.authors), frozenset(found.absent)
        self._plans[found.round] = plan_of(self.rules.run, authors, absent, self.rules.chunks, self.spec)
        self._decided[found.round] = found

    def history(self) -> ReducerHistory:
        """Return what the final sets so far say about later rounds, right after `decide`."""
        return places.history_of(self._misses, self._decided.values())

    def resume(self, history: ReducerHistory) -> None:
        """Go on after a summary, as if the final sets before had been decided here."""
        self._misses = places.misses_of(history)
        for each in history.decided:
            self._add_plan(each)

    def passed_over(self, number: int) -> dict[PeerId, int]:
        """Return the last round that a member may not reduce, of those that may not reduce round `number`."""
        last = {peer: missed.until + self.spec.gap for peer, missed in self._misses.items() if missed.times}
        return {peer: until for peer, until in last.items() if until >= number}

    def parts(self, number: int, names: Collection[Digest]) -> tuple[EffectiveSlice, ...] | None:
        """Return what counts in each slice; None if the set is illegal or covers what is not known yet."""
        claims = {name: claim for name in names if (claim := self.find_claim(name))}
        for offers in self._readings(number):
            absent = {offer.entry for offer in offers} - set(names)
            # What is in the ledger but not in the set counts only where a Reduction of the set covers it.
            parts = effective_slices(Round(number), self.plan(number), offers, claims, (), absent)
            if entries_of(parts, offers, absent) == tuple(sorted(names)):
                return parts
        return None

    def covered(self, claim: Claim) -> tuple[Offer, ...]:
        """Return the contributions that a Reduction covers; nothing while one of them is not known."""
        number = claim.body.round
        for offers in self._readings(number):
            if (found := covered_by(claim.body, self.plan(number), offers)) is not None:
                return found
        return ()

    def unknown_members(self, names: Iterable[Digest]) -> tuple[Digest, ...]:
        """Return `members` of those Reductions of a set of which not all that they cover is known."""
        claims = [claim for name in names if (claim := self.find_claim(name))]
        return tuple(claim.body.members for claim in claims if not self.covered(claim))

    def _readings(self, number: int) -> Iterator[tuple[Offer, ...]]:
        """Yield the contributions to a round, one of each author: as the feeds here have them first."""
        histories: dict[PeerId, list[Offer]] = {}
        for entry in self.orphans.values():
            if isinstance(entry.body, SlicedContribution) and entry.body.round == number:
                offer = Offer(entry.id, entry.author, entry.body.weight, entry.seq)
                histories.setdefault(entry.author, []).append(offer)
        here = self.offers(number)
        for offer in here:
            if offer.author in histories:
                histories[offer.author].insert(0, offer)
        others = tuple(offer for offer in here if offer.author not in histories)
        # A set, and the Reductions in it, say by digest which history they mean.
        for chosen in islice(product(*histories.values()), _READINGS):
            yield tuple(sorted((*others, *chosen)))

    def has_ours(self, part: EffectiveSlice) -> bool:
        """Return whether the own contribution counts in a slice."""
        covered = self.covered(part.reduced) if part.reduced is not None else ()
        return any(offer.author == self.me for offer in (*covered, *part.raw))

    def ours(self, number: int) -> Claim | None:
        """Return the own Reduction of a round."""
        mine = (c for c in self.claims.values() if c.author == self.me and c.body.round == number)
        return next(mine, None)

    def newest_of_ours(self, before: int) -> Claim | None:
        """Return the newest own Reduction of a round before this one."""
        mine = [c for c in self.claims.values() if c.author == self.me and c.body.round < before]
        return max(mine, key=lambda claim: claim.body.round, default=None)

    def reduced_payloads(self, first: int = 0) -> set[Digest]:
        """Return the payloads of all Reductions from this round on."""
        bodies = [claim.body for claim in self.claims.values()]
        bodies += [entry.body for entry in self.orphans.values() if isinstance(entry.body, Reduction)]
        return {body.payload for body in bodies if body.round >= first}

    def forget_author(self, author: PeerId, first: int, kept: Collection[Digest]) -> None:
        """Forget an author that the ledger let go of, but for what is in `kept`.

        What may count in rounds before `first` stays: their reducers may have covered it.
        """
        theirs = {name: entry.body.round for name, entry in self.entries.items() if entry.author == author}
        if not theirs:
            return
        rounds = {*theirs.values()}
        counting = {offer.entry for number in rounds if number < first for offer in self.offers(number)}
        counting |= {name for name in theirs.keys() & self.claims.keys() if theirs[name] < first}
        gone = theirs.keys() - counting - {*kept}
        for number in rounds & self._offers.keys():
            self._offers[number] = {n: offer for n, offer in self._offers[number].items() if n not in gone}
        self._offers = {at: offers for at, offers in self._offers.items() if offers}
        self._keep(self.claims.keys() - gone)

    def forget(self, before: int) -> None:
        """Forget the rounds before this one, whose payloads are dropped."""
        self._offers = {at: offers for at, offers in self._offers.items() if at >= before}
        self.orphans = {name: entry for name, entry in self.orphans.items() if entry.body.round >= before}
        self._plans = {at: plan for at, plan in self._plans.items() if at >= before - REMEMBERED}
        self._keep({e for e, claim in self.claims.items() if claim.body.round >= before - REMEMBERED})

    def _keep(self, claims: Collection[Digest]) -> None:
        self.claims = {entry: claim for entry, claim in self.claims.items() if entry in claims}
        self._claimed = {(claim.author, claim.body.round) for claim in self.claims.values()}
        # Payloads go with `before`; Reductions stay for REMEMBERED rounds, because proofs need the one before.
        kept = {entry for offers in self._offers.values() for entry in offers} | self.claims.keys()
        self.entries = {name: entry for name, entry in self.entries.items() if name in kept}
