"""Work of another chain: it was trained from a model that ours does not have. Pure. Rules: docs/epochs.md."""

from atoll.node.daemon.consensus.chains.epochs import EpochId
from atoll.node.daemon.consensus.types import FinalityState
from atoll.protocols.ledger.records import Epoch


def parting(state: FinalityState, choice: EpochId) -> Epoch | None:
    """Return the epoch by which the chain of an author that chose `choice` leaves ours for good.

    A function of the ledger and of our chain up to the round that it decides. None for an epoch that our chain
    holds, for one that may still become a part of it, and for one of which too little is known.
    """
    book, chain = state.epochs, state.chain
    trunk = frozenset(segment.epoch for segment in chain)
    left_by = None if choice in trunk else book.leaves(choice, trunk)
    # Signing alone changes no model: members that wait for an epoch, or give it up, go on in ours.
    if left_by is None or not book.is_complete(left_by):
        return None
    body = book.bodies[left_by]
    # Ours goes on from the same epoch by another one, or decided there what the other side decided apart.
    return body if body.parent != chain[-1].epoch or body.round < state.deciding else None
