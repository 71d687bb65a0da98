"""Exclusions by votes: whom the voters of a round exclude. Pure.

The run's owner excludes alone. Anybody else's `Exclude` is a vote. A final set names contributions, and each of
them fixes what stands before it in its author's feed: so the set says what its authors had voted for. A member is
excluded from the first round on of whose voters a quorum did so by the set before it, if the set has work of it.
Rules: docs/removal.md.
"""

from collections import Counter
from collections.abc import Collection, Mapping

from msgspec.structs import replace

from atoll.node.daemon.consensus.epochs import ROOT
from atoll.node.daemon.consensus.types import FinalityState
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.ledger.ballots import Book, quorum
from atoll.protocols.ledger.records import Proposal


def note_votes(book: Book, contribution: Digest, cast: Mapping[PeerId, int], wanted: Mapping[PeerId, int]) -> Book:
    """The book that knows which votes stand before a contribution in its author's feed.

    `wanted`: of these members the author also wants the work taken out, since these rounds.
    """
    if contribution not in book.contributions:
        return book  # its author's second one in the round
    votes = {**book.votes_against, contribution: cast}
    excise_votes = {**book.excise_votes, contribution: wanted} if wanted else book.excise_votes
    return replace(book, votes_against=votes, excise_votes=excise_votes)


def count_votes(state: FinalityState, book: Book, final: Proposal) -> FinalityState:
    """The state whose voters were chosen by this final set, without the members that these voted to exclude."""
    # Only votes that the set fixes: who comes late, restarts or learns of more votes finds the same. And nobody
    # that was a voter long ago, when the run was small, can vote for that time afterwards.
    number, voted_out = state.deciding, dict(state.epochs.voted_out)
    authors = {name: book.author_of(name) for name in final.contributions}
    voting = [name for name, author in authors.items() if author in state.voters]
    cast = [book.votes_against.get(name, {}) for name in voting]
    support = Counter(peer for votes in cast for peer, first in votes.items() if first <= number)
    # In an epoch a few decide alone, and what they vote stands when the others are back. So the member must be
    # there, a voter itself, and the votes a quorum of all that worked lately, not only of those that are left.
    needed = needed_votes(state)
    for peer, votes in support.items():
        if votes >= needed and peer in authors.values():
            voted_out.setdefault(peer, number)
    state = replace(state, epochs=replace(state.epochs, voted_out=voted_out))
    return _count_excisions(state, book, voting, needed)


def _count_excisions(state: FinalityState, book: Book, voting: Collection[Digest], needed: int) -> FinalityState:
    """The state that knows whose work enough of these voters want taken out."""
    # Only of members that are excluded: whoever is away could not defend itself against a few that are there.
    gone, wanted = state.epochs.excluded_from(state.deciding), dict(state.epochs.to_excise)
    cast = [book.excise_votes[name] for name in voting if name in book.excise_votes]
    for peer in gone - wanted.keys():
        since = sorted(votes[peer] for votes in cast if peer in votes)
        if len(since) >= needed:
            wanted[peer] = since[needed - 1]  # so many of them want this round, or one before it
    return replace(state, epochs=replace(state.epochs, to_excise=wanted))


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
