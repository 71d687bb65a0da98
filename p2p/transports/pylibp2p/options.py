"""Options of the py-libp2p transport, and the reasons why other features are refused. Imports nothing heavy."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

_REFUSED: Final = {
    "quic": "py-libp2p's QUIC moved 13 MB/s where its TCP moved 400; it listens on TCP only",
    "hole_punching": "a hole is punched over QUIC, and py-libp2p's QUIC is too slow to train over",
    "port_map": "it asks no router for a port (UPnP, NAT-PMP); open the port by hand",
    "relays": "py-libp2p 0.8 cannot hold a reservation at a relay, so nobody could reach it there",
    "relay_service": "its relay breaks another circuit of a peer when one of them ends",
}


@dataclass(frozen=True, slots=True)
class PyLibp2pOptions:
    """Options that py-libp2p supports. Multiaddrs without `/p2p/…`."""

    listen: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    """TCP only. Port 0 is chosen once and kept over restarts."""
    announce: tuple[str, ...] = ()
    """Replaces all announced addresses; empty: those we listen on, of every interface."""
    connections_max: int = 192
    """Live connections; further inbound ones are hung up."""
    keepalive_s: float = 10.0
    """A peer is pinged this often and is gone when it stays silent as long again."""


def unsupported(features: Iterable[str]) -> list[str]:
    """Return one reason for each feature that this transport lacks; features carry the names of P2pdOptions."""
    return [f"{name}: {_REFUSED[name]}; use the p2pd transport" for name in features if name in _REFUSED]


def refused_listen(maddrs: Iterable[str]) -> list[str]:
    """Return one reason for each listen address that is no plain TCP address."""
    return [f"{maddr}: {_REFUSED['quic']}" for maddr in maddrs if "/udp/" in maddr] + [
        f"{maddr}: it listens on /ip4/…/tcp/… or /ip6/…/tcp/…"
        for maddr in maddrs
        if "/udp/" not in maddr and len(maddr.strip("/").split("/")) != 4
    ]
