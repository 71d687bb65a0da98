"""Blocks of addresses: what one flood comes from, and a network rarely has more than one of."""

import ipaddress

from atoll.protocols.ids import PeerId
from atoll.protocols.ledger.set_limit import VIA

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


def arrival_line(author: PeerId, maddr: str, *, brought_by: str) -> str:
    """The block of an author, which `maddr` reaches, or behind VIA the block that it was brought by.

    Not of who first sent its records: whoever is quick could make a newcomer wait with what it brings itself.
    """
    is_direct = maddr and "/p2p-circuit" not in maddr
    return address_block(maddr) or author if is_direct else VIA + brought_by
