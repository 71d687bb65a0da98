"""Where peers may be dialled: the syntax of seeds, the address book, and its copy on disk."""

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
CACHE_FORMAT = 1
LASTING_S = 30.0
"""A connection that is lost sooner counts as a failed dial: the peer sends us away, or the path is bad."""
_CACHE_MAX_BYTES = 1 << 20
_EXAMPLE = "a seed looks like /ip4/203.0.113.7/tcp/4001/p2p/12D3KooW… or /dnsaddr/seed.example.org"
_DNSADDR = "/dnsaddr/"
_DNS_NAME_MAX = 253 - len("_dnsaddr.")


def parse_seed(text: str) -> PeerAddress:
    """`/ip4/…/tcp/…/p2p/12D3…`, also through a relay (`…/p2p/RELAY/p2p-circuit/p2p/PEER`), or a name in DNS.

    `/dnsaddr/NAME[/p2p/PEER]` becomes an address with the one multiaddr `/dnsaddr/NAME`, and an empty PeerID
    where any peer that DNS names will do; Discovery resolves it. Raises ConfigError.
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
    """A seed that must be resolved before it can be dialled."""
    return seed.maddrs[0].startswith(_DNSADDR)


def dns_name(maddr: str) -> str:
    """NAME of `/dnsaddr/NAME`. Raises DecodeError."""
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
    """What we know of reaching one peer. Times are on our monotonic clock."""

    peer: PeerId
    maddrs: dict[str, str] = field(default_factory=dict)
    """Multiaddr -> where we have it from: seed, dns, cache, exchange, dht, dialled."""
    failures: int = 0
    next_dial: float = 0.0
    last_error: str = ""
    last_seen: float | None = None
    connected_at: float | None = None
    banned_until: float = 0.0
    """Not dialled before, whatever happens."""
    connection_order: int = 0
    """Rises with each connection in the whole book; 0: never connected."""
    misses: int = 0
    """From the cache: earlier lives in which others answered but this peer did not."""

    @property
    def is_proven(self) -> bool:
        """Connected in this life, or in the one that wrote the cache."""
        return self.connection_order > 0 or "cache" in self.maddrs.values()

    @property
    def address(self) -> PeerAddress:
        """Everything worth dialling, newest knowledge first."""
        return PeerAddress(self.peer, tuple(reversed(self.maddrs)))


class AddressBook:
    """Peers and their addresses, bounded; seeds are never evicted."""

    def __init__(self, own: PeerId, *, max_peers: int = MAX_PEERS) -> None:
        self._own = own
        self._max_peers = max_peers
        self._known: dict[PeerId, KnownPeer] = {}
        self._connections = 0

    def add(self, peer: PeerId, maddrs: Iterable[str], source: str) -> None:
        """Learn addresses of a peer; illegal ones and our own are ignored."""
        legal = legal_maddrs(maddrs)
        if peer == self._own or not legal:
            return
        known = self._known.get(peer) or self._admit(peer)
        if known is None:
            return
        for maddr in legal:
            known.maddrs[maddr] = known.maddrs.pop(maddr, source)
        while len(known.maddrs) > MADDRS_PER_PEER:
            del known.maddrs[next(iter(known.maddrs))]

    def get(self, peer: PeerId) -> KnownPeer | None:
        """What we know of `peer`."""
        return self._known.get(peer)

    def all(self) -> list[KnownPeer]:
        """Everybody we know of, in the order of hearing."""
        return list(self._known.values())

    def connected(self, peer: PeerId, now: float) -> None:
        """A connection to `peer` exists."""
        known = self._known.get(peer) or self._admit(peer)
        if known is not None:
            self._connections += 1
            known.connection_order, known.last_seen, known.connected_at = self._connections, now, now

    def lost(self, peer: PeerId, now: float) -> bool:
        """The connection to `peer` is gone; True if it had lasted, and the peer deserves a quick new dial."""
        known = self._known.get(peer)
        if known is None or known.connected_at is None:
            return True
        lasted_s = now - known.connected_at
        known.last_seen, known.connected_at = now, None
        if lasted_s >= LASTING_S:
            known.failures, known.last_error = 0, ""
        return lasted_s >= LASTING_S

    def ban(self, peer: PeerId, reason: str, until: float) -> None:
        """Do not dial `peer` before `until`."""
        if known := self._known.get(peer):
            known.failures += 1
            known.last_error, known.next_dial, known.banned_until = reason, until, until

    def failed(self, peer: PeerId, reason: str, next_dial: float) -> None:
        """A dial failed; the next may be made at `next_dial`."""
        if known := self._known.get(peer):
            known.failures += 1
            known.last_error, known.next_dial = reason, next_dial

    def postponed(self, peer: PeerId, reason: str, next_dial: float) -> None:
        """Nobody really dialled, because the last try was a moment ago; what that one said still holds."""
        if known := self._known.get(peer):
            known.failures = max(known.failures, 1)
            known.last_error, known.next_dial = known.last_error or reason, next_dial

    def save(self, path: Path) -> None:
        """Write the best peers, best first: those of this life, then those of the cache we started with.

        Nothing is written before the first connection: a life without a network knows no better. DiskFault.
        """
        if not self._connections:
            return
        best = sorted((known for known in self._known.values() if known.is_proven and known.maddrs), key=_by_worth)
        rows = [_CachedPeer(known.peer, known.address.maddrs, _misses(known)) for known in best[:CACHED_PEERS]]
        write_whole(path, msgspec.json.format(msgspec.json.encode(_Cache(CACHE_FORMAT, rows))) + b"\n")

    def load(self, path: Path) -> int:
        """Learn the peers of an earlier life, or of another node of the run; how many. Raises DiskFault.

        A damaged file is no cache. Addresses are checked as any peer's claims are.
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
