"""Reputation: counts proven protocol violations of peers, and bans peers for a while.

Only PeerFaults count: bytes that no correct node sends. Slowness and lost connections never count.
"""

from collections.abc import Callable
from dataclasses import dataclass

from atoll.protocols.errors import DecodeError, PeerFault, RunMismatch, SignatureFault, VersionMismatch
from atoll.protocols.ids import PeerId

FAULTS_ALLOWED = 8.0
"""Score above which a peer is banned; each fault adds 1."""
HALF_LIFE_S = 600.0
"""Seconds in which a score halves."""
BAN_S = 600.0
STRANGER_S = 600.0
"""For so many seconds a peer of another run is left alone; its operator may correct it."""
VERSION_S = 30.0
"""The same for one of another version: an upgrade is a matter of a restart."""
BANNED = "is banned now"
"""In the line that is logged about each ban."""
LEFT_ALONE = "is left alone for a while"
"""In that about a peer of another run or version, which did nothing wrong."""
_MAX_PEERS = 4096


@dataclass(slots=True)
class Reputation:
    """Faults of one peer. Times are on our monotonic clock."""

    faults: int = 0
    score: float = 0.0
    at: float = 0.0
    last: str = ""
    banned_until: float = 0.0
    is_stranger: bool = False
    """Whether it is banned as a peer of another run or version."""


class ReputationTable:
    """Reputations of all peers with a fault."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._peers: dict[PeerId, Reputation] = {}

    def blame(self, peer: PeerId, fault: PeerFault) -> bool:
        """Count a fault; True if the peer is banned now."""
        record, now = self._of(peer), self._now()
        record.last = fault.line()
        record.is_stranger = isinstance(fault, RunMismatch)
        if record.is_stranger:
            until = now + (VERSION_S if isinstance(fault, VersionMismatch) else STRANGER_S)
            record.banned_until = max(record.banned_until, until)
            return True
        if not isinstance(fault, DecodeError | SignatureFault):
            return False  # a plain PeerFault is the peer's own complaint about us
        record.faults += 1
        record.score = record.score * 0.5 ** ((now - record.at) / HALF_LIFE_S) + 1
        record.at = now
        if record.score > FAULTS_ALLOWED:
            record.banned_until = now + BAN_S
            return True
        return False

    def is_banned(self, peer: PeerId) -> bool:
        """Whether `peer` is banned now."""
        record = self._peers.get(peer)
        return record is not None and record.banned_until > self._now()

    def get(self, peer: PeerId) -> Reputation:
        """Reputation of `peer`."""
        return self._peers.get(peer) or Reputation()

    def _of(self, peer: PeerId) -> Reputation:
        if peer not in self._peers and len(self._peers) >= _MAX_PEERS:
            del self._peers[next(iter(self._peers))]
        return self._peers.setdefault(peer, Reputation())
