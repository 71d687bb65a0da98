"""What an epoch takes over from the one before: a set that may be final there (docs/epochs.md and removal.md)."""

from msgspec.structs import replace

from atoll.node.daemon.consensus.excision import is_due
from atoll.node.daemon.consensus.exclusion import outvoted
from atoll.node.daemon.consensus.types import FinalityState
from atoll.protocols.ledger.ballots import Book, named_by
from atoll.protocols.ledger.choices import Choice, choice_of


def inherited(state: FinalityState) -> Choice | None:
    """What the epoch before may have decided in the first round of ours; None: nothing that is known."""
    # Somebody that is gone may have seen a quorum for it, and gave it out as final. Most such sets have a vote
    # here, and what was final stays so.
    if len(state.chain) == 1 or state.chain[-1].first != state.deciding:
        return None
    book = state.books.get(state.deciding, Book()).within(state.chain[-2].epoch)
    before = state.chain[-1].electorate.voters
    votes = {key: many for key, many in named_by(book.votes, before).items() if key[1] in book.proposals}
    found = {key: choice_of(book.proposals[key[1]]) for key in votes}
    # Of a third one is honest. It knew the reason, or was bound by one that did.
    lawful = [key for key, choice in found.items() if 3 * votes[key] >= len(before) or _has_reason(state, choice)]
    return found[max(lawful)] if lawful else None


def _has_reason(state: FinalityState, choice: Choice) -> bool:
    """Whether this node knows the reason for all that a set of the epoch before removes."""
    # One vote shows that a set may be final, but a liar's would remove whom it likes. Where most are away, no
    # number of votes shows that it is not. An honest voter has the reason in its ledger, so it reaches the others.
    if not choice.excluded and not choice.excised:
        return True  # nearly always
    # As the voters of the epoch before counted. A proof of two histories may have come since they did.
    before = replace(state, voters=state.chain[-1].electorate.voters, equivocators=frozenset())
    return {*choice.excluded} <= {*outvoted(before, choice.names)} and is_due(before, choice.excised)
