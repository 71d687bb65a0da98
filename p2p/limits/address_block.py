"""Blocks of addresses: what one flood comes from, and a network rarely has more than one of."""

import ipaddress

_BLOCK_BITS = {4: 24, 6: 64}


def address_block(maddr: str) -> str:
    """The /24 (IPv4) or /64 (IPv6) of a multiaddr, that of the relay for a relayed one; empty: it names no IP."""
    parts = maddr.split("/")
    if len(parts) < 3 or parts[1] not in ("ip4", "ip6"):
        return ""
    try:
        address = ipaddress.ip_address(parts[2])
        return str(ipaddress.ip_network((address, _BLOCK_BITS[address.version]), strict=False))
    except ValueError:
        return ""
