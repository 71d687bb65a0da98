"""The members that a status mentions, and what they announce themselves as."""

from collections.abc import Mapping

from atoll.protocols.ids import PeerId
from atoll.protocols.ledger.registers import Lease, Value
from atoll.protocols.local.control_messages import Status


def names_in(now: Status, live: Mapping[PeerId, Value]) -> dict[str, str]:
    """By PeerID: the names in the live leases of those members. Members without a name are left out."""
    told = {*now.contributors, now.val_by, *(one.peer for one in now.excluded)}
    told |= {vote.peer for vote in now.votes_against} | {one.peer for one in now.diminished}
    return {
        peer: lease.name
        for peer, lease in live.items()
        if peer in told and isinstance(lease, Lease) and lease.name
    }
