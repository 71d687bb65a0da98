"""Exclusions by votes: whom a proposal excludes, and whether this node counts the votes for that. Pure.

The run's owner excludes alone. Anybody else's `Exclude` is a vote. A proposal names whom the authors of its set
voted out (`ExcludingProposal`), and a voter votes for it only if it counts enough of their votes itself. So what
is final says who is excluded. All nodes find the same, whichever votes they have and whichever history of an
equivocator they hold: to follow a final round nobody counts votes. Rules: docs/removal.md.
"""

from collections import Counter
from collections.abc import Collection

from msgspec.structs import replace

from atoll.node.daemon.consensus.types import FinalityState
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.ledger.ballots import quorum


def outvoted(state: FinalityState, names: Collection[Digest]) -> tuple[PeerId, ...]:
    """Whom a proposal of this set may exclude from the next round on, as far as this node knows; sorted."""
    votes = state.epochs.votes_against
    if not votes:
        return ()  # nearly always
    # Those that the set makes voters, not those of today: a few that decide alone exclude nobody that comes back.
    authors, number = state.book.authors_of(names), state.deciding + 1
    voters = state.tally.proven(authors, state.voters)
    # Nodes hold different histories of an equivocator. Where its votes count on some nodes only, sets lose
    # ballots; once the proof has spread they count on none.
    cast = [votes[peer] for peer in (voters - state.equivocators) & votes.keys()]
    support = Counter(peer for each in cast for peer, first in each.items() if first <= number)
    # In an epoch a few decide alone, and what they vote stands when the others are back. So the member must be
    # there itself, and the votes a quorum of all that worked lately, not only of those that are left.
    needed, there = needed_votes(state, voters), authors - state.epochs.excluded_from(number)
    return tuple(sorted(peer for peer, many in support.items() if many >= needed and peer in there))


def needed_votes(state: FinalityState, voters: Collection[PeerId]) -> int:
    """How many votes exclude a member: two thirds of these voters and of all that worked lately."""
    return quorum(len(state.electorate(state.deciding).recent.union(voters)))


def note_excluded(state: FinalityState, excluded: Collection[PeerId]) -> FinalityState:
    """The state after the newest final proposal, which excludes these members from the round after it on."""
    # The first final proposal counts: open rounds must not get a member's work back.
    voted_out = {**dict.fromkeys(excluded, int(state.deciding)), **state.epochs.voted_out}
    return replace(state, epochs=replace(state.epochs, voted_out=voted_out))
