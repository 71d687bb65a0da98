"""Why voters excluded a member, as they said themselves."""

from collections.abc import Mapping

from atoll.node.daemon.consensus.types import FinalityState
from atoll.protocols.ids import PeerId


def reason_given(
    state: FinalityState, peer: PeerId, first: int, *, reasons: Mapping[tuple[PeerId, PeerId], str]
) -> str:
    """What one of the voters that excluded a member gave as its reason: the same one on all nodes."""
    is_known = first == state.deciding or first in state.decided
    voters = state.electorate(first).voters if is_known else ()
    return next((text for (of, by), text in sorted(reasons.items()) if of == peer and by in voters), "")
