"""Multiaddrs: which texts a node can dial, and what they say: IP address, transport, port, and whether it is
global.

Reading one never raises; checking one does.
"""

import ipaddress
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from atoll.protocols.errors import DecodeError

MADDR_MAX_CHARACTERS = 256
MADDRS_PER_PEER = 16
"""Most addresses that a node keeps, or publishes, for one peer."""
_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_-]{1,63})*\.?")


def parse_maddr(text: str) -> str:
    """Return `text`, checked to be a multiaddr that can be dialled, without the peer's own /p2p part.

    Raises DecodeError.
    """
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
    """The addresses claimed by a peer that can be dialled, at most MADDRS_PER_PEER."""
    return tuple(maddr for maddr in maddrs if _is_legal(maddr))[:MADDRS_PER_PEER]


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


def is_name(text: str) -> bool:
    """Whether `text` is a DNS host name in ASCII."""
    return _NAME.fullmatch(text) is not None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 20


def _is_peer(text: str) -> bool:
    # A relay may have any key type; its PeerID is only passed on.
    return re.fullmatch(r"[1-9A-HJ-NP-Za-km-z]{40,64}", text) is not None


_CHECKS = {
    "ip4": _is_ip4,
    "ip6": _is_ip6,
    "dns": is_name,
    "dns4": is_name,
    "dns6": is_name,
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


@dataclass(frozen=True, slots=True)
class Endpoint:
    """IP address, transport (`tcp` or `udp`) and port of a multiaddr."""

    ip: str
    transport: str
    port: int

    @property
    def is_ip6(self) -> bool:
        """Whether the address is IPv6; else it is IPv4."""
        return ":" in self.ip


def endpoint_of(maddr: str) -> Endpoint | None:
    """Endpoint of an IP multiaddr; None for circuits, names, other kinds and illegal texts."""
    parts = maddr.split("/")
    if "p2p-circuit" in parts or len(parts) < 5 or parts[1] not in ("ip4", "ip6"):
        return None
    if parts[3] not in ("tcp", "udp") or not (parts[4].isascii() and parts[4].isdigit()):
        return None
    if not _is_ip(parts[2]):
        return None
    return Endpoint(parts[2], parts[3], int(parts[4]))


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_global(maddr: str) -> bool:
    """Whether the address is routed in the public internet."""
    endpoint = endpoint_of(maddr)
    return endpoint is not None and ipaddress.ip_address(endpoint.ip).is_global


def is_loopback(maddr: str) -> bool:
    """Whether the address is a loopback address of this machine."""
    endpoint = endpoint_of(maddr)
    return endpoint is not None and ipaddress.ip_address(endpoint.ip).is_loopback


def is_of_dial(maddr: str, dialled: Collection[str]) -> bool:
    """Whether the remote address `maddr` of a connection may be one of the addresses that were dialled.

    The peer may have dialled us: by TCP from a port where nobody answers, by QUIC from the one where it listens.
    """
    # Names were resolved: only ports can be compared.
    return _tcp_port(maddr) in {None, *map(_tcp_port, dialled)}


def _tcp_port(maddr: str) -> str | None:
    parts = maddr.split("/")
    return parts[4] if parts[3:4] == ["tcp"] else None


def with_ip(maddr: str, ip: str) -> str:
    """`maddr` with its IP address replaced by `ip`."""
    parts = maddr.split("/")
    parts[1], parts[2] = ("ip6" if ":" in ip else "ip4"), ip
    return "/".join(parts)
