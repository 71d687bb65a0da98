"""Where peers may be dialled: multiaddr and seed syntax, the address book, and its copy on disk."""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from atoll.p2p.files import read_whole, write_whole
from atoll.p2p.host import PeerAddress
from atoll.protocols.errors import ConfigError, DecodeError
from atoll.protocols.ids import PeerId, peer_bytes

MADDR_MAX_CHARACTERS = 256
MADDRS_PER_PEER = 16
MAX_PEERS = 2000
CACHED_PEERS = 64
CACHE_FORMAT = 1
LASTING_S = 30.0
"""A connection that is lost sooner counts as a failed dial: the peer sends us away, or the path is bad."""
_CACHE_MAX_BYTES = 1 << 20
_EXAMPLE = "a seed looks like /ip4/203.0.113.7/tcp/4001/p2p/12D3KooW…"
_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_-]{1,63})*\.?")


def parse_seed(text: str) -> PeerAddress:
    """`/ip4/…/tcp/…/p2p/12D3…`, also through a relay (`…/p2p/RELAY/p2p-circuit/p2p/PEER`). Raises ConfigError."""
    maddr, separator, peer = text.strip().rpartition("/p2p/")
    if not separator or not maddr:
        raise ConfigError(f"seed {text!r} does not end in an address and /p2p/PEERID", hint=_EXAMPLE)
    try:
        peer_bytes(PeerId(peer))
        return PeerAddress(PeerId(peer), (parse_maddr(maddr),))
    except DecodeError as error:
        raise ConfigError(f"seed {text!r}: {error}", hint=_EXAMPLE) from error


def parse_maddr(text: str) -> str:
    """`text` if it is a multiaddr that a node can dial, without the peer's own /p2p part. Raises DecodeError."""
    parts = text.split("/")
    if len(text) > MADDR_MAX_CHARACTERS or len(parts) < 3 or parts[0] != "":
        raise DecodeError(f"{text[:80]!r} is not a multiaddr")
    at, previous = 1, ""
    while at < len(parts):
        name = parts[at]
        if previous not in _FOLLOWS.get(name, ()):
            raise DecodeError(f"{text[:80]!r} is not a multiaddr: {name!r} after {previous or 'nothing'!r}")
        if name in _CHECKS:
            at += 1
            if at >= len(parts) or not _CHECKS[name](parts[at]):
                raise DecodeError(f"{text[:80]!r} is not a multiaddr: bad value of {name}")
        at, previous = at + 1, name
    if previous not in _ENDS:
        raise DecodeError(f"{text[:80]!r} is not a multiaddr that can be dialled")
    return text


def legal_maddrs(maddrs: Iterable[str]) -> tuple[str, ...]:
    """Those of a peer's claimed addresses that can be dialled."""
    return tuple(maddr for maddr in maddrs if _is_legal(maddr))[:MADDRS_PER_PEER]


@dataclass(slots=True)
class KnownPeer:
    """What we know of reaching one peer. Times are on our monotonic clock."""

    peer: PeerId
    maddrs: dict[str, str] = field(default_factory=dict)
    """Multiaddr -> where we have it from: seed, cache, exchange, dht, dialled."""
    failures: int = 0
    next_dial: float = 0.0
    last_error: str = ""
    last_seen: float | None = None
    connected_at: float | None = None
    away_until: float = 0.0
    """Not dialled before, whatever happens."""
    good: int = 0
    """Rises with each connection in the whole book; 0: never connected."""

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
            known.good, known.last_seen, known.connected_at = self._connections, now, now

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

    def keep_away(self, peer: PeerId, reason: str, until: float) -> None:
        """Do not dial `peer` before `until`."""
        if known := self._known.get(peer):
            known.failures += 1
            known.last_error, known.next_dial, known.away_until = reason, until, until

    def failed(self, peer: PeerId, reason: str, next_dial: float) -> None:
        """A dial failed; the next may be made at `next_dial`."""
        if known := self._known.get(peer):
            known.failures += 1
            known.last_error, known.next_dial = reason, next_dial

    def save(self, path: Path) -> None:
        """Write the best peers, best first. Raises DiskFault."""
        good = sorted((known for known in self._known.values() if known.good and known.maddrs), key=_by_good)
        rows = [_CachedPeer(known.peer, known.address.maddrs) for known in good[:CACHED_PEERS]]
        write_whole(path, msgspec.json.format(msgspec.json.encode(_Cache(CACHE_FORMAT, rows))) + b"\n")

    def load(self, path: Path) -> int:
        """Learn the peers of an earlier life; how many. A damaged file is no cache. Raises DiskFault."""
        data = read_whole(path, max_bytes=_CACHE_MAX_BYTES)
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
            self.add(row.peer, row.maddrs, "cache")
        return len(self._known)

    def _admit(self, peer: PeerId) -> KnownPeer | None:
        if len(self._known) >= self._max_peers:
            victims = [known for known in self._known.values() if "seed" not in known.maddrs.values()]
            if not victims:
                return None
            worst = min(victims, key=lambda known: (known.good, -known.failures))
            del self._known[worst.peer]
        known = self._known[peer] = KnownPeer(peer)
        return known


class _CachedPeer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    peer: PeerId
    maddrs: tuple[str, ...]


class _Cache(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    peers: list[_CachedPeer]


def _by_good(known: KnownPeer) -> int:
    return -known.good


def _is_legal(maddr: str) -> bool:
    try:
        parse_maddr(maddr)
    except DecodeError:
        return False
    return True


def _is_ip4(text: str) -> bool:
    try:
        return not ipaddress.IPv4Address(text).is_multicast
    except ValueError:
        return False


def _is_ip6(text: str) -> bool:
    try:
        return not ipaddress.IPv6Address(text).is_multicast and "%" not in text
    except ValueError:
        return False


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) < 65536


def _is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 20


def _is_peer(text: str) -> bool:
    # A relay may have any key type; its PeerID is only passed on.
    return re.fullmatch(r"[1-9A-HJ-NP-Za-km-z]{40,64}", text) is not None


_CHECKS = {
    "ip4": _is_ip4,
    "ip6": _is_ip6,
    "dns": _is_name,
    "dns4": _is_name,
    "dns6": _is_name,
    "tcp": _is_port,
    "udp": _is_port,
    "p2p": _is_peer,
    "memory": _is_number,
}
_HOSTS = ("ip4", "ip6", "dns", "dns4", "dns6")
_TRANSPORTS = ("tcp", "quic-v1", "ws", "wss", "memory")
_FOLLOWS = {
    **dict.fromkeys((*_HOSTS, "memory"), ("",)),
    "tcp": _HOSTS,
    "udp": _HOSTS,
    "quic-v1": ("udp",),
    "ws": ("tcp",),
    "wss": ("tcp",),
    "p2p": ("", *_TRANSPORTS),
    "p2p-circuit": ("p2p",),
}
_ENDS = (*_TRANSPORTS, "p2p-circuit")
