"""When leases began, as far as a node can tell: by its own clock, and rounded. Pure."""

from collections.abc import Mapping

from atoll.node.daemon.rounds.participants import MemberView
from atoll.protocols.ids import PeerId

NEWER_S = 1.0
"""Times at which leases began are rounded: by so much one is later than the loss of a connection."""


def without_newer_leases(
    times: Mapping[PeerId, float], members: Mapping[PeerId, MemberView]
) -> dict[PeerId, float]:
    """The times, in monotonic seconds, of those members of which no lease began since."""
    return {peer: at for peer, at in times.items() if peer in members and members[peer].heard <= at + NEWER_S}


def rounded_s(seconds: float) -> float:
    """Round to half seconds: the time at which a lease began must not look new at each reading."""
    return float(int(seconds * 2.0 + 0.5)) / 2.0
