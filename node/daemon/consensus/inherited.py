"""What an epoch takes over from the one before: a set that may be final there (docs/epochs.md and removal.md)."""

from atoll.node.daemon.consensus.types import FinalityState
from atoll.protocols.ledger.ballots import Book, named_by, quorum
from atoll.protocols.ledger.choices import Choice, choice_of


def inherited(state: FinalityState) -> Choice | None:
    """What the epoch before may have decided in the first round of ours; None: nothing that is known."""
    # Somebody that is gone may have seen a quorum for it, and gave it out as final. Most such sets have a vote
    # here, and what was final stays so.
    if len(state.chain) == 1 or state.chain[-1].first != state.deciding:
        return None
    book = state.books.get(state.deciding, Book()).within(state.chain[-2].epoch)
    before, members = state.chain[-1].electorate.voters, {*state.voters} - state.equivocators
    known, unknown = named_by(book.votes, members), {*before} - members
    votes = [key for key in named_by(book.votes, before) if key[1] in book.proposals]
    # One vote is enough, but to exclude a member: a liar's would do. That takes as many as may have been a quorum.
    lawful = [
        key
        for key in votes
        if not choice_of(book.proposals[key[1]]).excluded or known[key] + len(unknown) >= quorum(len(before))
    ]
    return choice_of(book.proposals[max(lawful)[1]]) if lawful else None
