"""What the ledger says about reduced rounds: who reduces, what was offered and claimed, what counts. Pure.

A set names contributions and Reductions; what counts in it follows from the set alone, once everything that its
Reductions cover is known.
"""

from collections.abc import Collection

from atoll.node.daemon.reduction.effective_set import Effective, effective, entries_of, one_per_author, tainted
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.records import Entry, Reduction, SlicedContribution
from atoll.protocols.ledger.reduction import Claim, Offer, ReductionRules, covered_by
from atoll.protocols.run.slices import ReduceSpec, SlicePlan, all_gather, plan_of

REMEMBERED = 128
"""Rounds whose plans and Reductions are kept after their payloads are dropped: later ones may continue them."""


class ReducedSets:
    """Entries about rounds, and the plans that follow from final sets."""

    def __init__(self, me: PeerId, rules: ReductionRules, spec: ReduceSpec) -> None:
        self.me, self.rules, self.spec = me, rules, spec
        self.entries: dict[Digest, Entry] = {}
        """Contributions and Reductions."""
        self.claims: dict[Digest, Claim] = {}
        """At most one of an author and round: of several the first in its feed counts."""
        self._claimed: set[tuple[PeerId, int]] = set()
        self._offers: dict[int, dict[Digest, Offer]] = {}
        self._plans: dict[int, SlicePlan] = {}

    def note(self, entry: Entry) -> Offer | Claim | None:
        """Take an entry; what it is for a round, if anything."""
        match entry.body:
            case SlicedContribution(number):
                offer = Offer(entry.id, entry.author, entry.body.weight, entry.seq)
                self._offers.setdefault(number, {})[entry.id] = offer
                self.entries[entry.id] = entry
                return offer
            case Reduction(number) if (entry.author, number) not in self._claimed:
                self._claimed.add((entry.author, number))
                claim = self.claims[entry.id] = Claim(entry.id, entry.author, entry.body)
                self.entries[entry.id] = entry
                return claim
        return None

    def plan(self, number: int) -> SlicePlan:
        """Slices and reducers of a round; nobody reduces as long as its deciding set is not known."""
        return self._plans.get(number) or all_gather(self.rules.chunks)

    def offers(self, number: int) -> tuple[Offer, ...]:
        """Contributions to a round that count, by rising entry id."""
        return one_per_author(self._offers.get(number, {}).values())

    def contribution(self, entry: Digest) -> SlicedContribution:
        """The body of an offer."""
        body = self.entries[entry].body
        assert isinstance(body, SlicedContribution)
        return body

    def decide(self, number: int, names: Collection[Digest]) -> Round:
        """The final set of a round is known: it names the reducers of a later one, which is returned."""
        authors = frozenset(self.entries[e].author for e in names if e not in self.claims and e in self.entries)
        present = {self.claims[e].author for e in names if e in self.claims}
        absent = frozenset(self.plan(number).reducers) - present
        decided = Round(number + self.spec.gap)
        self._plans[decided] = plan_of(self.rules.run, authors, absent, self.rules.chunks, self.spec)
        return decided

    def parts(self, number: int, names: Collection[Digest]) -> tuple[Effective, ...] | None:
        """What counts in each slice of a set. None: something covered is not known yet, or the set is illegal."""
        offers = self.offers(number)
        claims = {name: self.claims[name] for name in names if name in self.claims}
        absent = {offer.entry for offer in offers} - set(names)
        parts = effective(Round(number), self.plan(number), offers, claims, (), absent)
        return parts if entries_of(parts, offers, absent) == tuple(sorted(names)) else None

    def covered(self, claim: Claim) -> tuple[Offer, ...]:
        """What a Reduction covers; empty where that is not known."""
        number = claim.body.round
        return covered_by(claim.body, self.plan(number), self.offers(number)) or ()

    def has_ours(self, part: Effective) -> bool:
        """Whether our own contribution counts in a slice."""
        covered = self.covered(part.reduced) if part.reduced is not None else ()
        return any(offer.author == self.me for offer in (*covered, *part.raw))

    def ours(self, number: int) -> Claim | None:
        """Our own Reduction of a round."""
        mine = (c for c in self.claims.values() if c.author == self.me and c.body.round == number)
        return next(mine, None)

    def newest_of_ours(self, before: int) -> Claim | None:
        """Our newest Reduction of a round before this one."""
        mine = [c for c in self.claims.values() if c.author == self.me and c.body.round < before]
        return max(mine, key=lambda claim: claim.body.round, default=None)

    def tainted(self, wrong: Collection[Digest]) -> frozenset[Digest]:
        """These, and what continues them."""
        return tainted(self.claims, wrong)

    def reduced_payloads(self, first: int = 0) -> set[Digest]:
        """Payloads of all Reductions from this round on."""
        return {claim.body.payload for claim in self.claims.values() if claim.body.round >= first}

    def forget(self, before: int) -> None:
        """The payloads of rounds before this one are dropped."""
        self._offers = {at: offers for at, offers in self._offers.items() if at >= before}
        self._plans = {at: plan for at, plan in self._plans.items() if at >= before - REMEMBERED}
        self.claims = {e: claim for e, claim in self.claims.items() if claim.body.round >= before - REMEMBERED}
        self._claimed = {(claim.author, claim.body.round) for claim in self.claims.values()}
        kept = {entry for offers in self._offers.values() for entry in offers} | self.claims.keys()
        self.entries = {name: entry for name, entry in self.entries.items() if name in kept}
