"""Which sets a voter accepts: those that name enough of what this node has, or that it is bound to. Pure.

The authors of a final set decide the next round, so a set with few of the contributions would give the run to few.
Rules in words: docs/finality.md.
"""

from collections.abc import Collection

from atoll.node.daemon.consensus.ballots import bound_proposals
from atoll.node.daemon.consensus.types import FinalityState
from atoll.protocols.ids import Digest
from atoll.protocols.ledger.records import Ballot


def may_get_votes(state: FinalityState, ballot: Ballot, names: tuple[Digest, ...]) -> bool:
    """Whether this node would vote for the set in this ballot, if it gives the same state here."""
    if ballot.attempt == 0:
        return is_broad(state, names)
    # Voters count the promises in their own ledger. If they took the proposer's word for what a quorum may have
    # voted for, one liar could hide those votes and have a second set made final.
    bound = bound_proposals(state.book, state.voters, ballot)
    if not bound:
        return bound is not None and is_broad(state, names)
    # A set that all are bound to may be narrow, and is voted for all the same: another one could contradict it.
    # While more than one set may have had a quorum, none is safe: more promises will rule all but one out.
    proposal = state.book.proposals.get(bound[0]) if len(bound) == 1 else None
    repeats = proposal is not None and proposal.contributions == names
    return repeats and (_all_answered(state, ballot) or is_broad(state, names))


def _all_answered(state: FinalityState, ballot: Ballot) -> bool:
    """Whether all voters have promised, or had half a patience to do so."""
    # One more promise may show that no quorum voted for a narrow set. At exactly a third of liars one silent
    # honest voter is enough to make it look possible: therefore the wait.
    promised = state.book.promised_by(state.voters, ballot)
    return len(promised) == len(state.voters) or state.now - state.since >= state.patience_s / 2


def is_broad(state: FinalityState, names: Collection[Digest]) -> bool:
    """Whether the set names all that we have; or more than half of it, once that will hardly grow any more."""
    # More than half: of n contributions at most n/3 are liars', so of m > n/2 named ones they have less than 2m/3,
    # no quorum. The set after it needs an honest vote again, so sets cannot shrink step by step. The share never
    # gets smaller with time or attempts: liars could wait for that.
    named, ours = share_of_ours(state, names)
    return 0 < ours == named or (state.stable_since is not None and 2 * named > ours)


def is_narrow(state: FinalityState, names: Collection[Digest]) -> bool:
    """Whether the set lacks half or more of what we have, once that will hardly grow any more."""
    named, ours = share_of_ours(state, names)
    return state.stable_since is not None and ours > 0 and 2 * named <= ours


def share_of_ours(state: FinalityState, names: Collection[Digest]) -> tuple[int, int]:
    """How many contributions of our own set of the round a set names, and how many that has; (0, 0) too early."""
    # Our own set, not the ledger: work that no peer serves, or of members in name only, is in no set. An idle node
    # may never close the round, and counts what it holds after its patience.
    view, known = state.views.get(state.deciding), state.book.contributions
    rested = state.idle and state.stable_since is not None and state.now - state.stable_since >= state.patience_s
    ours = {entry for entry in view or (state.held if rested else ()) if entry in known}
    return len(ours.intersection(names)), len(ours)
