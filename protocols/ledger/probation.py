"""Probation: which authors of a final set decide the next round. Pure.

Identities cost nothing, so an author decides only after its work is in enough final sets. The counts follow from
the final sets of a chain alone. All nodes that decide a round have decided the same rounds before it, so their
counts are the same. Rules in words: docs/finality.md.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import TypeAlias

import msgspec

from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.ledger.records import Contribution

Members: TypeAlias = Iterable[tuple[Digest, PeerId, Contribution]]
"""The contributions of a set: entry ids, authors and bodies."""


class Tally(msgspec.Struct, frozen=True):
    """How many of a chain's final sets name each author."""

    probation: int = 1
    """Final sets after which an author decides; 1: with its first."""
    rounds: int = 0
    """Number of final rounds: the number of the round that is decided next."""
    counts: Mapping[PeerId, int] = msgspec.field(default_factory=dict)
    newcomers: int = 0
    """Newcomers that a final set may name where it names fewer others (`audit.newcomers`); 0: any number."""

    def proven(self, authors: Collection[PeerId], voters: Collection[PeerId] = ()) -> frozenset[PeerId]:
        """Those of the authors that decide the next round, if these are the authors of the next final set.

        Never empty for any authors: if none worked long enough, those that worked most do. `voters` decide
        the set; they matter in runs with `audit.voters` only (audits/shown_work.py).
        """
        if self.probation == 1:
            return frozenset(authors)
        # While a run is young nobody can have worked for long. Half of its rounds, because members miss some. The
        # number does not depend on the other authors: a proposer must not lower it by leaving out the oldest.
        needed = min(self.probation, (self.rounds + 2) // 2)
        worked = {author: self.counts.get(author, 0) + 1 for author in authors}
        most = max(worked.values(), default=0)
        # All that worked long are gone: those that are left go on.
        needed = needed if most >= needed else (most + 1) // 2
        return frozenset(author for author, count in worked.items() if count >= needed)

    def missing(self, author: PeerId) -> int:
        """In how many more final sets in a row the author must be until it decides; 0: it is not on probation.

        Where all that worked long are gone, those that are left decide earlier.
        """
        count = self.counts.get(author, 0)
        if self.probation == 1 or count >= min(self.probation, (self.rounds + 1) // 2):
            return 0
        # After k more sets it has `count + k`, and min(probation, (rounds + k + 1) // 2) are needed.
        return max(1, min(self.probation - count, self.rounds - 2 * count))

    def newcomers_of(self, authors: Collection[PeerId], voters: Collection[PeerId]) -> frozenset[PeerId]:
        """Those of a round's authors whom the bound is about: on probation, and not among the round's voters."""
        # Voters, because members of an epoch decide while they are on probation.
        return frozenset(peer for peer in authors if self.newcomers and self.missing(peer) and peer not in voters)

    def places(self, others: int) -> int:
        """How many newcomers a final set may name beside so many others: as many, or the run's number."""
        return max(self.newcomers, others)

    def is_over(self, authors: Collection[PeerId], voters: Collection[PeerId]) -> bool:
        """Whether a set of these authors, of the round after this tally, names more newcomers than it may."""
        many = len(self.newcomers_of(authors, voters))
        return many > self.places(len(authors) - many)

    def trial(self, author: PeerId) -> tuple[int, int]:
        """What final verdicts say of an author on probation: deviations of work that they show, and their number.

        Of anybody, in runs with `audit.voters`; else nothing.
        """
        return 0, 0

    def after(
        self, authors: Collection[PeerId], members: Members = (), deciding: Collection[PeerId] = ()
    ) -> "Tally":
        """The tally after a final set of these authors, of whom `deciding` decide the next round.

        What `members` say, the set's contributions, matters in runs with `audit.voters` only.
        """
        if self.probation == 1:
            return msgspec.structs.replace(self, rounds=self.rounds + 1)
        counts = {**self.counts, **{author: self.counts.get(author, 0) + 1 for author in authors}}
        return Tally(self.probation, self.rounds + 1, counts)

    @property
    def at_fork(self) -> "Tally":
        """What the chain remembers where an epoch begins: enough to say who decides after one more set."""
        return self


def level(weights: Collection[int], most: int) -> int:
    """What each of these weights may be at most, that all of them together are `most` at most.

    Max-min fairness: who claims more than the others takes nothing from them.
    """
    left = most
    for at, weight in enumerate(sorted(weights)):
        equal = left // (len(weights) - at)
        if weight > equal:
            return equal
        left -= weight
    return max(weights, default=0)


def scaled(weight: int, share_256: int) -> int:
    """This share of a weight, rounded down: 1 at least, but 0 of 0."""
    return max(1, weight * share_256 // 256) if weight else 0
