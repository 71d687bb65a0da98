"""Who worked in open rounds, and who came from another chain: what a node knows of members without votes.

Pure. Rules: docs/epochs.md.
"""

from atoll.node.daemon.consensus import types as finality_types
from atoll.node.daemon.consensus.presence import here_of
from atoll.protocols.ids import PeerId


def newest_rounds(state: finality_types.FinalityState) -> dict[PeerId, int]:
    """The newest open round that each author contributed to."""
    numbers = (number for number in sorted(state.books) if number > state.last_final)
    return {peer: number for number in numbers for peer in state.books[number].contributors}


def has_no_model(state: finality_types.FinalityState) -> bool:
    """Whether all voters that are here came from other chains, and voted nowhere since: who votes has a model."""
    here = here_of(state, state.voters)
    return bool(here) and all(state.epochs.voted.get(peer, 0) < 0 for peer in here)


def may_be_early(state: finality_types.FinalityState, here: frozenset[PeerId]) -> bool:
    """Whether members that are known by their work alone may not have shown theirs yet."""
    known = state.electorate(state.deciding)
    if not here.isdisjoint(known.recent.union(known.voters)) or state.deciding + 1 >= state.rounds:
        return False
    # Those that end a round together would each see no other work, and go on alone for good. Who trained the next
    # round waited for the others' work before.
    return newest_rounds(state).get(state.me, -1) <= state.deciding
