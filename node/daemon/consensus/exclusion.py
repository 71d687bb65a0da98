"""Exclusions by votes: whom the voters of a round exclude. Pure.

The run's owner excludes alone. Anybody else's `Exclude` is a vote. A final set names contributions, and each of
them fixes what stands before it in its author's feed: so the set says what its authors had voted for. A member is
excluded from the first round on of whose voters a quorum did so by the set before it, if the set has work of it.
Rules: docs/removal.md.
"""

from collections import Counter
from collections.abc import Mapping

from msgspec.structs import replace

from atoll.node.daemon.consensus.ballots import Book, quorum
from atoll.node.daemon.consensus.epochs import ROOT
from atoll.node.daemon.consensus.types import FinalityState
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.ledger.records import Proposal


def note_votes(book: Book, contribution: Digest, cast: Mapping[PeerId, int]) -> Book:
    """The book that knows which votes stand before a contribution in its author's feed."""
    if contribution not in book.contributions:
        return book  # its author's second one in the round
    return replace(book, votes_against={**book.votes_against, contribution: cast})


def count_votes(state: FinalityState, book: Book, final: Proposal) -> FinalityState:
    """The state whose voters were chosen by this final set, without the members that these voted to exclude."""
    # Only votes that the set fixes: who comes late, restarts or learns of more votes finds the same. And nobody
    # that was a voter long ago, when the run was small, can vote for that time afterwards.
    number, voted_out = state.deciding, dict(state.epochs.voted_out)
    authors = {name: book.author_of(name) for name in final.contributions}
    cast = [book.votes_against.get(name, {}) for name, author in authors.items() if author in state.voters]
    support = Counter(peer for votes in cast for peer, first in votes.items() if first <= number)
    # In an epoch a few decide alone, and what they vote stands when the others are back. So the member must be
    # there, a voter itself, and the votes a quorum of all that worked lately, not only of those that are left.
    needed = needed_votes(state)
    for peer, votes in support.items():
        if votes >= needed and peer in authors.values():
            voted_out.setdefault(peer, number)
    return replace(state, epochs=replace(state.epochs, voted_out=voted_out))


def needed_votes(state: FinalityState) -> int:
    """How many votes exclude a member now: two thirds of the voters, and of all that worked lately."""
    return quorum(max(len(state.voters), len(state.electorate(state.deciding).recent)))


def works_with_us(state: FinalityState, peer: PeerId) -> bool:
    """Whether a member that voters excluded works in their epoch, or in one that continues it."""
    # An epoch of few may exclude those of another chain. Who cut them off would never see that theirs is the one
    # to follow.
    final = state.epochs.voted_out[peer] - 1
    epoch = next(segment.epoch for segment in reversed(state.chain) if segment.first <= final)
    return epoch in (ROOT, *state.epochs.ancestors(state.epochs.choice(peer)))
