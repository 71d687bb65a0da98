"""Whether a proposed set names enough of what this node has: a proposer must not make a round its own. Pure.

The authors of a final set decide the next round, so a set with few of the contributions would give the run to few.
Why this share, and why it never gets smaller: docs/finality.md.
"""

from collections.abc import Collection

from atoll.node.daemon.consensus.ballots import bound_to
from atoll.node.daemon.consensus.types import FinalityState
from atoll.protocols.ids import Digest
from atoll.protocols.ledger.records import Ballot


def may_get_votes(state: FinalityState, ballot: Ballot, names: tuple[Digest, ...]) -> bool:
    """Is it a set that this node would vote for in this ballot, if it gives the same state here?

    After the first ballot the promises may bind all to a set that is narrow; and to no other one, whatever its
    proposer says.
    """
    if ballot.attempt == 0:
        return is_broad(state, names)
    bound = bound_to(state.book, state.acceptors, ballot)
    if not bound:
        return bound is not None and is_broad(state, names)
    proposal = state.book.proposals.get(bound[0]) if len(bound) == 1 else None
    repeats = proposal is not None and proposal.contributions == names
    return repeats and (_heard_all(state, ballot) or is_broad(state, names))


def _heard_all(state: FinalityState, ballot: Ballot) -> bool:
    """Have all promised, or had the time to? One more promise may show that nobody is bound to a narrow set."""
    promised = state.book.who_promised(state.acceptors, ballot)
    return len(promised) == len(state.acceptors) or state.now - state.since >= state.patience_s / 2


def is_broad(state: FinalityState, names: Collection[Digest]) -> bool:
    """Does it name all that we have; or more than half of that, when it will hardly grow any more?"""
    named, ours = share_of_ours(state, names)
    return 0 < ours == named or (state.ripe_at is not None and 2 * named > ours)


def is_narrow(state: FinalityState, names: Collection[Digest]) -> bool:
    """Does it lack half or more of what we have, when that will hardly grow any more?"""
    named, ours = share_of_ours(state, names)
    return state.ripe_at is not None and ours > 0 and 2 * named <= ours


def share_of_ours(state: FinalityState, names: Collection[Digest]) -> tuple[int, int]:
    """How many of our own contributions a set names, and how many these are; none before it is time to say.

    Ours are those of our own set of the round: a payload that nobody gives is in nobody's set. Who rests may
    never close the round, and takes what it holds after a while.
    """
    view, known = state.views.get(state.last_final + 1), state.book.contributions
    rested = state.idle and state.ripe_at is not None and state.now - state.ripe_at >= state.patience_s
    ours = {entry for entry in view or (state.held if rested else ()) if entry in known}
    return len(ours.intersection(names)), len(ours)
