"""Whom of the excluded members a node may cut off. Pure."""

from atoll.node.daemon.consensus.chains.epochs import ROOT
from atoll.node.daemon.consensus.types import FinalityState
from atoll.protocols.ids import PeerId


def works_with_us(state: FinalityState, peer: PeerId) -> bool:
    """Whether a member that voters excluded works in their epoch, or in one that continues it."""
    # An epoch of few may exclude those of another chain. Who cut them off would never see that theirs is the one
    # to follow.
    final = state.epochs.voted_out[peer] - 1
    epoch = next(segment.epoch for segment in reversed(state.chain) if segment.first <= final)
    return epoch in (ROOT, *state.epochs.ancestors(state.epochs.choice(peer)))
