"""Which of the offered snapshots to try next: who offers it counts first, then how often it failed. Pure.

An offer costs nothing: a lease names any blob as the state of any round, and nobody can tell before the bytes are
here. So offers are sorted by what their authors have shown, and each failure counts against them.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeVar

from atoll.protocols.errors import DiskFault, OtherChain, PeerFault
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.registers import Lease

K = TypeVar("K")
RETRY_S = 5.0
"""Seconds before an offer that failed once is tried again. They double with each failure."""
LAST_RETRY_S = 300.0
FORGET_S = 4 * 3600.0
"""Seconds after its rest until a failure is forgotten: longer than a turn of all members that may offer."""
REMEMBERED = 4096
"""Most authors, and most blobs, whose failures are remembered; the newest are."""
REFUSED_S = 3600.0
"""Seconds before a blob is tried again for a state that it was not."""

LEFT_LATE = 4
"""So many snapshots of another state are no fault: their author had not left its chain yet, perhaps, or its lease
is from before that. The rests after them are 75 s together, which is more than the lease of every preset."""


class Trust(IntEnum):
    """What the author of an offer has shown; the best comes first."""

    OWN = 0
    RECENT = 1
    """One of the newest final sets names it."""
    WORKED = 2
    """An older one does, or a payload of it was verified here."""
    UNKNOWN = 3
    START = 4
    """Θ₀, which the RunSpec names: nobody lies about it, but every newer state is of more use."""


@dataclass(frozen=True, slots=True)
class SnapshotOffer:
    """A live member holds Θ_final(round) as this blob."""

    peer: PeerId
    blob: Digest
    round: Round


@dataclass(frozen=True, slots=True)
class OfferedSnapshot:
    """A blob that is said to be Θ_final(round), whose digest is `state`."""

    blob: Digest
    round: Round
    state: Digest
    peers: tuple[PeerId, ...]
    """Who says so, the most trusted first."""
    trust: Trust
    """That of the first."""


@dataclass(frozen=True, slots=True)
class _Record:
    failures: int
    until: float
    """Monotonic seconds."""


@dataclass(slots=True)
class OfferBook:
    """Remembers which offers failed, and who made them."""

    _peers: dict[PeerId, _Record] = field(default_factory=dict)
    _blobs: dict[tuple[Digest, Round, Digest], _Record] = field(default_factory=dict)
    _others: dict[PeerId, _Record] = field(default_factory=dict)
    """Authors of snapshots that had another state."""

    def sort(
        self,
        offers: Iterable[SnapshotOffer],
        states: Mapping[int, Digest],
        trust_of: Callable[[PeerId], Trust],
        now: float,
    ) -> list[OfferedSnapshot]:
        """Return what may be tried now of the rounds in `states`, the best first. Equal offers are one."""
        groups: dict[tuple[Digest, Round], list[PeerId]] = {}
        for offer in offers:
            if offer.round in states:
                groups.setdefault((offer.blob, offer.round), []).append(offer.peer)
        found = []
        for (blob, number), named in groups.items():
            # Who lies about other blobs cannot keep this one out: it only does not speak for it.
            peers = sorted(
                (peer for peer in named if _is_over(self._peers.get(peer), now)),
                key=lambda peer: (trust_of(peer), _failures(self._peers.get(peer))),
            )
            one = (
                OfferedSnapshot(blob, number, states[number], tuple(peers), trust_of(peers[0])) if peers else None
            )
            if one is not None and _is_over(self._blobs.get(_key(one)), now):
                found.append(one)
        return sorted(found, key=lambda one: (one.trust, self._tries(one), -one.round))

    def _tries(self, one: OfferedSnapshot) -> int:
        return self.failures(one) + _failures(self._peers.get(one.peers[0]))

    def failures(self, one: OfferedSnapshot) -> int:
        """Return how often this blob failed lately, whoever offered it."""
        return _failures(self._blobs.get(_key(one)))

    def has_failed(self, one: OfferedSnapshot | None = None) -> bool:
        """Return whether this offer failed lately; None: whether any did."""
        return bool(self._blobs) if one is None else _key(one) in self._blobs

    def is_fault(self, one: OfferedSnapshot, error: PeerFault) -> bool:
        """Return whether no correct node offers what failed so, once it was added. It rests in any case."""
        return not isinstance(error, OtherChain) or _failures(self._others.get(one.peers[0])) > LEFT_LATE

    def add(self, one: OfferedSnapshot, error: Exception, now: float, *, is_isolated: bool = False) -> None:
        """Record why a download, or the check of what came, failed. `is_isolated`: nobody reaches this node."""
        if one.trust == Trust.START or isinstance(error, DiskFault) or is_isolated:
            self._rest(one, now)
        elif isinstance(error, PeerFault):
            self._refused(one, now, is_other=isinstance(error, OtherChain))
        else:
            self._failed(one, now)

    def _rest(self, one: OfferedSnapshot, now: float) -> None:
        """Try an offer again in RETRY_S: that it failed was nobody's fault."""
        self._blobs[_key(one)] = _Record(self.failures(one), now + RETRY_S)

    def _failed(self, one: OfferedSnapshot, now: float) -> None:
        """An offer was not kept in time: it and all who made it rest, longer each time."""
        self._forget(now)
        self._blobs[_key(one)] = _again(self._blobs.get(_key(one)), now)
        for peer in one.peers:
            self._peers[peer] = _again(self._peers.get(peer), now)

    def _refused(self, one: OfferedSnapshot, now: float, *, is_other: bool) -> None:
        """A blob is not the state that it was offered as."""
        self._failed(one, now)
        self._blobs[_key(one)] = _Record(self.failures(one), now + REFUSED_S)
        if is_other:
            self._others[one.peers[0]] = _again(self._others.get(one.peers[0]), now)

    def _forget(self, now: float) -> None:
        """Forget old failures, so that memory is bounded."""
        self._peers, self._blobs = _newest(self._peers, now), _newest(self._blobs, now)
        self._others = _newest(self._others, now)


def offers_of(leases: Mapping[PeerId, tuple[Lease, float]]) -> list[SnapshotOffer]:
    """Return what live leases offer. Anybody may write one."""
    return [
        SnapshotOffer(peer, Digest(lease.snapshot), Round(lease.snapshot_round))
        for peer, (lease, _) in leases.items()
        if lease.snapshot and lease.snapshot_round >= 0
    ]


def trust_by(
    me: PeerId, recent: Collection[PeerId], is_tried: Callable[[PeerId], bool]
) -> Callable[[PeerId], Trust]:
    """Return what tells the trust of an author. `recent`: the authors of the newest final sets."""

    def trust_of(peer: PeerId) -> Trust:
        if peer == me:
            return Trust.OWN
        if peer in recent:
            return Trust.RECENT
        return Trust.WORKED if is_tried(peer) else Trust.UNKNOWN

    return trust_of


def _key(one: OfferedSnapshot) -> tuple[Digest, Round, Digest]:
    # A true blob may be offered as another round's. After a change of chain a round has another state.
    return one.blob, one.round, one.state


def _newest(records: dict[K, _Record], now: float) -> dict[K, _Record]:
    left = {key: old for key, old in records.items() if now < old.until + FORGET_S}
    over = len(left) - REMEMBERED
    for key in sorted(left, key=lambda key: left[key].until)[:over] if over > 0 else ():
        del left[key]
    return left


def _failures(record: _Record | None) -> int:
    return record.failures if record else 0


def _is_over(record: _Record | None, now: float) -> bool:
    return record is None or record.until <= now


def _again(record: _Record | None, now: float) -> _Record:
    failures = _failures(record) + 1
    return _Record(failures, now + min(LAST_RETRY_S, RETRY_S * 2.0 ** min(failures - 1, 10)))
