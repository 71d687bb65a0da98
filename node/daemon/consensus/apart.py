"""Work of another chain: it was trained from a model that ours does not have. Pure. Rules: docs/epochs.md."""

from atoll.node.daemon.consensus.chains.epochs import EpochId
from atoll.node.daemon.consensus.types import FinalityState


def is_apart(state: FinalityState, choice: EpochId) -> bool:
    """Whether an author that chose this epoch works in a chain that conflicts with ours.

    A function of the ledger and of our chain up to the round that it decides. False for an epoch that our chain
    holds, for one that may still become a part of it, and for one of which too little is known.
    """
    book, chain = state.epochs, state.chain
    trunk = frozenset(segment.epoch for segment in chain)
    left_by = None if choice in trunk else book.leaves(choice, trunk)
    # Signing alone changes no model: members that wait for an epoch, or give it up, go on in ours.
    if left_by is None or not book.is_complete(left_by):
        return False
    body = book.bodies[left_by]
    # Ours goes on from the same epoch by another one, or decided there what the other side decided apart.
    return body.parent != chain[-1].epoch or body.round < state.deciding
