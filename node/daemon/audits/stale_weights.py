"""What work weighs whose base is older than its round (`pace.stale`): whole numbers, the same on every node.

FedBuff (arXiv 2106.06639): w / √(1 + s), of a base that is s rounds old. Its author says s; all check its bound.

FedFix (arXiv 2206.10189): w over the share of the sets before the round that name the author, in whole numbers at
most w. Those that are always in time have w / (most + 1), those in one of most + 1 sets have w. Like probation's
it follows from the final sets, and of open rounds from those of the view (newcomer_weights.py).

Rules: docs/staleness.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isqrt

from atoll.node.daemon.audits.newcomer_weights import KEPT, OnSet, Weigh
from atoll.node.daemon.coordinator.contribution_sets import ContributionIndex, Found
from atoll.node.daemon.core.interfaces import RunContext
from atoll.node.daemon.core.runtime import EventQueue, Machines
from atoll.node.daemon.rounds.types import Reweighed
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.probation import scaled
from atoll.protocols.ledger.records import age_of

WINDOWS = 4
"""Sets that say how often a member is in time, over those of which the slowest legal one is in one."""


def share_of_age(age: int) -> int:
    """FedBuff's 1/√(1 + age) in 256ths, rounded down; exact on every machine."""
    return isqrt(65536 // (1 + age))


def by_age(claimed: Weigh, number: Round, found: Found) -> Mapping[Digest, int]:
    """Return FedBuff's weight of each of these contributions to a round."""
    weights = claimed(number, found)
    return {entry: scaled(weights[entry], share_of_age(age_of(record))) for entry, _, record in found}


def by_rarity(weight: int, sets: Sequence[frozenset[PeerId]], author: PeerId, most: int) -> int:
    """FedFix's weight of an author's work after these sets, the oldest first; from 1 to `weight`, 0 of 0."""
    named = [at for at, authors in enumerate(sets) if author in authors]
    # Nothing is known of an author without work. It weighs as if it was always in time: identities are free.
    seen, counted = (len(sets) - named[0], len(named)) if named else (1, 1)
    return max(1, min(weight, weight * seen // (counted * (most + 1)))) if weight else 0


@dataclass(kw_only=True)
class RarityWeights:
    """FedFix's weights, for one run."""

    most: int
    """Rounds by which a base may be older than its round."""
    context: RunContext
    contributions: ContributionIndex
    queue: EventQueue
    machines: Machines
    claimed: Weigh
    final: int = -1
    """The newest final round."""
    _authors: dict[int, frozenset[PeerId]] = field(default_factory=dict)
    """Authors of the final set of each round, or of the view's set if it is open."""
    _given: dict[int, tuple[Found, Mapping[Digest, int]]] = field(default_factory=dict)
    """The newest set of each open round that was weighed, and its weights."""

    def weigh(self, number: Round, found: Found) -> Mapping[Digest, int]:
        """Return the weight of each of these contributions to a round, for its fold."""
        weights = self._weights(number, found)
        if number > self.final:
            self._given[number] = found, weights
        return weights

    def on_set(self, number: Round, names: tuple[Digest, ...], is_final: bool) -> None:
        """The view has this set of a round, or it is final: later rounds have their weights from it."""
        if number <= self.final:
            return
        self._authors[number] = frozenset(author for _, author, _ in self.contributions.find(names))
        if is_final:
            self.final = number
            self._authors = {at: each for at, each in self._authors.items() if at > number - KEPT}
            self._given = {at: given for at, given in self._given.items() if at > number}
        for later, (found, weights) in list(self._given.items()):
            if later > number and self._weights(Round(later), found) != weights:
                del self._given[later]
                self.queue.post(partial(self.machines.feed_round, Reweighed(Round(later), self.context.now())))

    def _weights(self, number: Round, found: Found) -> dict[Digest, int]:
        first = max(0, number - WINDOWS * (self.most + 1))
        sets = [self._authors.get(at, frozenset()) for at in range(first, number)]
        weights = self.claimed(number, found)
        return {entry: by_rarity(weights[entry], sets, author, self.most) for entry, author, _ in found}


def weights_of(
    *,
    context: RunContext,
    queue: EventQueue,
    machines: Machines,
    contributions: ContributionIndex,
    claimed: Weigh,
) -> tuple[Weigh, list[OnSet]]:
    """Return what weighs the sets of a run with `pace.stale`, and what must learn of each set for that."""
    stale = context.spec.pace.stale
    if not stale or stale.weights == "equal":
        return claimed, []
    if stale.weights == "fedbuff":
        return partial(by_age, claimed), []
    rarity = RarityWeights(
        most=stale.most,
        context=context,
        contributions=contributions,
        queue=queue,
        machines=machines,
        claimed=claimed,
    )
    return rarity.weigh, [rarity.on_set]
