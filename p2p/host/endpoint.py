"""IP address, transport and port of a multiaddr, and whether the address is global. No text raises an error."""

import ipaddress
from dataclasses import dataclass


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


def with_ip(maddr: str, ip: str) -> str:
    """`maddr` with its IP address replaced by `ip`."""
    parts = maddr.split("/")
    parts[1], parts[2] = ("ip6" if ":" in ip else "ip4"), ip
    return "/".join(parts)
