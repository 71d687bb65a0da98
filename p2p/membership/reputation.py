"""What peers did wrong, as far as we can prove it, and whom we keep away for a while.

Only PeerFaults count: bytes that no correct node sends. Slowness and lost connections never do.
"""

from collections.abc import Callable
from dataclasses import dataclass

from atoll.protocols.errors import DecodeError, PeerFault, RunMismatch, SignatureFault
from atoll.protocols.ids import PeerId

FAULTS_ALLOWED = 8.0
HALF_LIFE_S = 600.0
BAN_S = 600.0
STRANGER_S = 600.0
"""A peer of another run is left alone for so long; its operator may change it."""
_MAX_PEERS = 4096


@dataclass(slots=True)
class Reputation:
    """One peer's record. Times on our monotonic clock."""

    faults: int = 0
    score: float = 0.0
    at: float = 0.0
    last: str = ""
    banned_until: float = 0.0


class ReputationTable:
    """Records of all peers that ever did something wrong."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._peers: dict[PeerId, Reputation] = {}

    def blame(self, peer: PeerId, fault: PeerFault) -> bool:
        """Count a fault; True if the peer is to be disconnected now."""
        standing, now = self._of(peer), self._now()
        standing.last = fault.line()
        if isinstance(fault, RunMismatch):
            standing.banned_until = now + STRANGER_S
            return True
        if not isinstance(fault, DecodeError | SignatureFault):
            return False  # a plain PeerFault is the peer's own complaint about us
        standing.faults += 1
        standing.score = standing.score * 0.5 ** ((now - standing.at) / HALF_LIFE_S) + 1
        standing.at = now
        if standing.score > FAULTS_ALLOWED:
            standing.banned_until = now + BAN_S
            return True
        return False

    def is_banned(self, peer: PeerId) -> bool:
        """Do we keep away from `peer` now?"""
        standing = self._peers.get(peer)
        return standing is not None and standing.banned_until > self._now()

    def get(self, peer: PeerId) -> Reputation:
        """The peer's record."""
        return self._peers.get(peer) or Reputation()

    def _of(self, peer: PeerId) -> Reputation:
        if peer not in self._peers and len(self._peers) >= _MAX_PEERS:
            del self._peers[next(iter(self._peers))]
        return self._peers.setdefault(peer, Reputation())
