"""Which share of its weight the work of a member on probation has: a function of the sets before a round.

A made-up identity costs nothing, so its work counts little until enough final sets name it (`pace.probation_256`).
The weights of a round follow from all sets before it: final ones, and of open rounds those of the view. Where a
set changes, the rounds after it are folded again; equal sets give equal views. Rules: docs/aggregation.md.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from atoll.node.daemon.coordinator.contribution_sets import ContributionIndex, Found
from atoll.node.daemon.core.interfaces import RunContext
from atoll.node.daemon.core.runtime import EventQueue, Machines
from atoll.node.daemon.rounds.types import Reweighed
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.probation import Tally, level, scaled
from atoll.protocols.ledger.records import MAX_WEIGHT

Weigh: TypeAlias = Callable[[Round, Found], Mapping[Digest, int]]
"""Returns the weight of each of these contributions to a round, by entry id."""
OnSet: TypeAlias = Callable[[Round, tuple[Digest, ...], bool], None]
"""The view has this set of a round, or it is final."""


def claimed_weights(number: Round, found: Found) -> Mapping[Digest, int]:
    """Return the weights that contributions claim: those of a run without audits."""
    return {entry: record.weight for entry, _, record in found}


def no_one(number: Round) -> frozenset[PeerId]:
    """Return whose work audits leave without weight in a round, in a run without audits."""
    return frozenset()


KEPT = 1024
"""Final rounds whose newcomers are remembered: a worker may be so far behind."""


def on_probation(tally: Tally, authors: Iterable[PeerId]) -> frozenset[PeerId]:
    """The authors of a set whose work has a share of its weight; `tally`: of the sets before it."""
    everybody = frozenset(authors)
    found = frozenset(author for author in everybody if tally.missing(author))
    # Where all are new, a share of each weight changes nothing in the mean but its rounding.
    return frozenset() if found == everybody else found


@dataclass(kw_only=True)
class NewcomerWeights:
    """For one run with `pace.probation_256`."""

    share_256: int
    context: RunContext
    contributions: ContributionIndex
    queue: EventQueue
    machines: Machines
    claimed: Weigh
    """Returns the weights without probation: those that contributions claim, or what audits leave of them."""
    tally: Tally
    """Of all final sets."""
    is_bounded: bool = False
    """Whether newcomers together are a part of the weight (`outer.by_weight`)."""
    gone_in: Callable[[Round], frozenset[PeerId]] = no_one
    """Returns whose work audits leave without weight in a round: it is not counted among the others'."""
    final: int = -1
    """The newest final round."""
    _newest: frozenset[PeerId] = frozenset()
    """Authors of the newest final set."""
    _new: dict[int, frozenset[PeerId]] = field(default_factory=dict)
    """Authors of final sets on probation, by round."""
    _authors: dict[int, frozenset[PeerId]] = field(default_factory=dict)
    """Authors of the view's set of each open round."""
    _given: dict[int, tuple[frozenset[PeerId], frozenset[PeerId]]] = field(default_factory=dict)
    """Authors of the newest set of each open round that was weighed, and those of them on probation."""
    _weighed: int = -1
    """The newest round that was weighed."""
    _left_256: dict[PeerId, int] = field(default_factory=dict)
    """256ths of their weight that its newcomers had in it."""

    def weigh(self, number: Round, found: Found) -> Mapping[Digest, int]:
        """Return the weight of each of these contributions to a round, for its fold."""
        authors = frozenset(author for _, author, _ in found)
        new = self._new_in(number, authors)
        if number > self.final:
            self._given[number] = authors, new
        weights = self.claimed(number, found)
        weights = {
            entry: scaled(weights[entry], self.share_256) if author in new else weights[entry]
            for entry, author, _ in found
        }
        given = self._bounded(number, found, new, weights) if self.is_bounded and new else weights
        if number >= self._weighed:
            self._weighed, theirs = (
                number,
                [(entry, who) for entry, who, _ in found if who in new and weights[entry]],
            )
            self._left_256 = {who: -(-self.share_256 * given[entry] // weights[entry]) for entry, who in theirs}
        return given

    def _bounded(
        self, number: Round, found: Found, new: frozenset[PeerId], weights: Mapping[Digest, int]
    ) -> Mapping[Digest, int]:
        """With newcomers that together weigh a third of what the others do, at most: a quarter of all."""
        gone = self.gone_in(number)
        theirs = [entry for entry, author, _ in found if author in new and author not in gone]
        others = sum(weights[entry] for entry, author, _ in found if author not in new and author not in gone)
        # Where audits leave nobody else any weight, newcomers go on.
        most = level([weights[entry] for entry in theirs], others // 3) if others else MAX_WEIGHT
        return {**weights, **{entry: min(weights[entry], most) for entry in theirs}}

    def on_set(self, number: Round, names: tuple[Digest, ...], is_final: bool) -> None:
        """The view has this set of a round, or it is final: later rounds have their weights from it."""
        authors = frozenset(author for _, author, _ in self.contributions.find(names))
        if is_final:
            self._new[number] = on_probation(self.tally, authors)
            self._new.pop(number - KEPT, None)
            self.tally, self.final, self._newest = self.tally.after(authors), number, authors
            self._authors = {at: each for at, each in self._authors.items() if at > number}
            self._given = {at: given for at, given in self._given.items() if at > number}
        elif number > self.final:
            self._authors[number] = authors
        for later, (everybody, new) in list(self._given.items()):
            if later > number and self._new_in(later, everybody) != new:
                del self._given[later]
                self.queue.post(partial(self.machines.feed_round, Reweighed(Round(later), self.context.now())))

    def share_of(self, author: PeerId) -> int:
        """256ths of its weight that an author's work has next, beside that of the newest final set's authors.

        Where newcomers are bounded together: what the newest round left it, or the one that it left least.
        """
        if author not in on_probation(self.tally, {*self._newest, author}):
            return 256
        return self._left_256.get(author, min(self._left_256.values(), default=self.share_256))

    def _new_in(self, number: int, authors: frozenset[PeerId]) -> frozenset[PeerId]:
        if number <= self.final:
            return self._new.get(number, frozenset())
        tally = self.tally
        for at in range(self.final + 1, number):
            tally = tally.after(self._authors.get(at, frozenset()))
        return on_probation(tally, authors)
