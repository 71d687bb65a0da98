"""The address book: addresses at which peers may be dialled, its copy on disk, and the syntax of seeds."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.host.maddrs import MADDRS_PER_PEER, is_name, legal_maddrs, parse_maddr
from atoll.p2p.system.atomic_files import read_whole, write_whole
from atoll.protocols.errors import ConfigError, CorruptFault, DecodeError
from atoll.protocols.ids import PeerId, peer_bytes

MAX_PEERS = 2000
CACHED_PEERS = 64
"""Number of peers in the copy on disk."""
CACHE_FORMAT = 1
HELD_S = 5.0
"""A connection that is lost sooner counts as a failed dial: the peer disconnects us, or the path is bad."""
LASTING_S = 30.0
"""A connection that lasts so long makes up for the failed dials before it."""
_CACHE_MAX_BYTES = 1 << 20
_EXAMPLE = "a seed looks like /ip4/203.0.113.7/tcp/4001/p2p/12D3KooW… or /dnsaddr/seed.example.org"
_DNSADDR = "/dnsaddr/"
_DNS_NAME_MAX = 253 - len("_dnsaddr.")


def parse_seed(text: str) -> PeerAddress:
    """Address of a seed: `/ip4/…/tcp/…/p2p/PEER`, through a relay `…/p2p/RELAY/p2p-circuit/p2p/PEER`, or a DNS
    name.

    `/dnsaddr/NAME[/p2p/PEER]` becomes an address with the single multiaddr `/dnsaddr/NAME`; its PeerID is empty if
    any peer that DNS names will do. Discovery resolves it. Raises ConfigError.
    """
    if text.strip().startswith(_DNSADDR):
        return _parse_dns_seed(text.strip())
    maddr, separator, peer = text.strip().rpartition("/p2p/")
    if not separator or not maddr:
        raise ConfigError(f"seed {text!r} does not end in an address and /p2p/PEERID", hint=_EXAMPLE)
    try:
        peer_bytes(PeerId(peer))
        return PeerAddress(PeerId(peer), (parse_maddr(maddr),))
    except DecodeError as error:
        raise ConfigError(f"seed {text!r}: {error}", hint=_EXAMPLE) from error


def is_dns_seed(seed: PeerAddress) -> bool:
    """Whether a seed is a DNS name, which must be resolved before it can be dialled."""
    return seed.maddrs[0].startswith(_DNSADDR)


def dns_name(maddr: str) -> str:
    """The NAME in `/dnsaddr/NAME`. Raises DecodeError."""
    name = maddr.removeprefix(_DNSADDR)
    if not maddr.startswith(_DNSADDR) or not is_name(name) or len(name) > _DNS_NAME_MAX:
        raise DecodeError(f"{maddr[:80]!r} does not name a host in DNS")
    return name


def _parse_dns_seed(text: str) -> PeerAddress:
    maddr, _, peer = text.partition("/p2p/")
    try:
        dns_name(maddr)
        if peer or text.endswith("/p2p/"):
            peer_bytes(PeerId(peer))
    except DecodeError as error:
        raise ConfigError(f"seed {text!r}: {error}", hint=_EXAMPLE) from error
    return PeerAddress(PeerId(peer), (maddr,))


@dataclass(slots=True)
class KnownPeer:
    """Addresses of one peer and the history of dials to it. Times are on our monotonic clock."""

    peer: PeerId
    maddrs: dict[str, str] = field(default_factory=dict)
    """Source of each multiaddr: seed, dns, cache, exchange, dht, dialled."""
    failures: int = 0
    """Number of failed dials in a row."""
    next_dial: float = 0.0
    quickest_dial_s: float | None = None
    """Duration of the shortest of our dials that got through, in seconds."""
    last_error: str = ""
    is_unreachable: bool = False
    """A dial failed since it was last connected; a connection that ended soon is none."""
    last_seen: float | None = None
    connected_at: float | None = None
    banned_until: float = 0.0
    """The peer is banned, and not dialled, before this time."""
    connection_order: int = 0
    """Serial number, in the whole book, of its newest connection; 0: never connected."""
    misses: int = 0
    """Number of earlier runs of this node in which other peers answered but this one did not (from the cache)."""

    @property
    def is_proven(self) -> bool:
        """Whether it was connected since the start, or in the run of this node that wrote the cache."""
        return self.connection_order > 0 or "cache" in self.maddrs.values()

    @property
    def address(self) -> PeerAddress:
        """All known multiaddrs, the newest first."""
        return PeerAddress(self.peer, tuple(reversed(self.maddrs)))


class AddressBook:
    """A bounded table of peers and their addresses; seeds are never evicted."""

    def __init__(self, own: PeerId, *, max_peers: int = MAX_PEERS) -> None:
        self._max_peers = max_peers
        self._known: dict[PeerId, KnownPeer] = {}
        self._own = own
        self._excluded = {own}
        self._connections = 0

    def add(self, peer: PeerId, maddrs: Iterable[str], source: str) -> None:
        """Add addresses of a peer; illegal ones, and our own, are ignored."""
        legal = legal_maddrs(maddrs)
        if peer in self._excluded or not legal:
            return
        known = self._known.get(peer) or self._admit(peer)
        if known is None:
            return
        for maddr in legal:
            known.maddrs[maddr] = known.maddrs.pop(maddr, source)
        while len(known.maddrs) > MADDRS_PER_PEER:
            del known.maddrs[next(iter(known.maddrs))]

    def get(self, peer: PeerId) -> KnownPeer | None:
        """The entry of `peer`; None if it is unknown."""
        return self._known.get(peer)

    def all(self) -> list[KnownPeer]:
        """All entries, in the order in which they were added."""
        return list(self._known.values())

    def connected(self, peer: PeerId, now: float) -> None:
        """Record a connection to `peer`."""
        known = self._known.get(peer) or self._admit(peer)
        if known is not None:
            self._connections += 1
            known.connection_order = self._connections
            known.last_seen = now
            known.connected_at = now
            known.is_unreachable = False

    def lost(self, peer: PeerId, now: float) -> bool:
        """Record a lost connection; True if it had held, so that `peer` may be dialled again at once."""
        known = self._known.get(peer)
        if known is None or known.connected_at is None:
            return True
        lasted_s = now - known.connected_at
        known.last_seen, known.connected_at = now, None
        if lasted_s >= LASTING_S:
            known.failures, known.last_error = 0, ""
        return lasted_s >= HELD_S

    def exclude(self, peer: PeerId) -> None:
        """Forget `peer` and learn of it no more: it was excluded from the run."""
        self._excluded.add(peer)
        self._known.pop(peer, None)

    def exclude_nobody(self) -> None:
        """Undo every `exclude`; addresses must be learnt anew."""
        self._excluded = {self._own}

    def ban(self, peer: PeerId, reason: str, until: float) -> None:
        """Do not dial `peer` before the time `until`."""
        if known := self._known.get(peer):
            known.failures += 1
            known.last_error = reason
            known.next_dial = until
            known.banned_until = until

    def failed(self, peer: PeerId, reason: str, next_dial: float) -> None:
        """Record a failed dial; the next may be made at the time `next_dial`."""
        if known := self._known.get(peer):
            known.failures += 1
            known.last_error, known.next_dial = reason, next_dial

    def postponed(self, peer: PeerId, reason: str, next_dial: float) -> None:
        """Record that the transport skipped a dial because the last one was a moment ago; keep its error."""
        if known := self._known.get(peer):
            known.failures = max(known.failures, 1)
            known.last_error, known.next_dial = known.last_error or reason, next_dial

    def save(self, path: Path) -> None:
        """Write the best peers, best first: those connected since the start, then those of the cache read at the
        start.

        Nothing is written before the first connection, which would lose a better cache. Raises DiskFault.
        """
        if not self._connections:
            return
        best = sorted((known for known in self._known.values() if known.is_proven and known.maddrs), key=_by_worth)
        rows = [_CachedPeer(known.peer, known.address.maddrs, _misses(known)) for known in best[:CACHED_PEERS]]
        write_whole(path, msgspec.json.format(msgspec.json.encode(_Cache(CACHE_FORMAT, rows))) + b"\n")

    def load(self, path: Path) -> int:
        """Add the peers of a cache file; return the number of known peers. Raises DiskFault.

        A damaged file is ignored. Addresses are checked like any other.
        """
        try:
            data = read_whole(path, max_bytes=_CACHE_MAX_BYTES)
        except CorruptFault:
            return 0
        try:
            cache = msgspec.json.decode(data or b"", type=_Cache, strict=True)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return 0
        if cache.format != CACHE_FORMAT:
            return 0
        for row in cache.peers[:CACHED_PEERS]:
            try:
                peer_bytes(row.peer)
            except DecodeError:
                continue
            self.add(row.peer, reversed(row.maddrs), "cache")  # the newest is learnt last
            if known := self._known.get(row.peer):
                known.misses = max(0, row.misses)
        return len(self._known)

    def _admit(self, peer: PeerId) -> KnownPeer | None:
        if len(self._known) >= self._max_peers:
            victims = [known for known in self._known.values() if "seed" not in known.maddrs.values()]
            if not victims:
                return None
            worst = min(victims, key=lambda known: (known.is_proven, known.connection_order, -known.failures))
            del self._known[worst.peer]
        known = self._known[peer] = KnownPeer(peer)
        return known


class _CachedPeer(msgspec.Struct, frozen=True):
    peer: PeerId
    maddrs: tuple[str, ...]
    misses: int = 0


class _Cache(msgspec.Struct, frozen=True):
    format: int
    peers: list[_CachedPeer]


def _by_worth(known: KnownPeer) -> tuple[int, int]:
    return -known.connection_order, _misses(known)


def _misses(known: KnownPeer) -> int:
    return 0 if known.connection_order else known.misses + (known.failures > 0)
