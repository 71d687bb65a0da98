"""Listen addresses: that a port is free before p2pd starts, and which port 0 became."""

import errno
import socket

from multiaddr import Multiaddr

from atoll.protocols.errors import LocalFault


def _port_of(maddr: str) -> tuple[str, str, str, int] | None:
    """(ip kind, host, `tcp` or `udp`, port) of a listen multiaddr; None for other kinds."""
    parts = maddr.split("/")
    if len(parts) >= 5 and parts[1] in ("ip4", "ip6") and parts[3] in ("tcp", "udp") and parts[4].isdigit():
        return parts[1], parts[2], parts[3], int(parts[4])
    return None


def with_port(maddr: str, actual: tuple[str, ...]) -> str:
    """`maddr` with port 0 replaced by the port that p2pd listens on."""
    wanted = _port_of(maddr)
    if wanted is None or wanted[3]:
        return maddr
    for found in filter(None, map(_port_of, actual)):
        if (found[0], found[2]) == (wanted[0], wanted[2]):
            return maddr.replace(f"/{wanted[2]}/0", f"/{wanted[2]}/{found[3]}")
    return maddr


def require_free(maddrs: tuple[str, ...]) -> None:
    """Raise LocalFault when another program listens there.

    go-libp2p sets SO_REUSEPORT: a second p2pd of the same user would start and steal connections.
    """
    for maddr in maddrs:
        try:
            Multiaddr(maddr)
        except Exception as error:  # multiaddr raises a dozen kinds
            raise LocalFault(
                f"not a listen address: {maddr}", hint="for instance /ip4/0.0.0.0/tcp/4001"
            ) from error
        place = _port_of(maddr)
        if place is None or not place[3]:
            continue
        family = socket.AF_INET if place[0] == "ip4" else socket.AF_INET6
        kind = socket.SOCK_STREAM if place[2] == "tcp" else socket.SOCK_DGRAM
        with socket.socket(family, kind) as probe:
            if kind == socket.SOCK_STREAM:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((place[1], place[3]))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise LocalFault(
                        f"port {place[3]} is in use", hint="choose another port or stop the other program"
                    ) from error
                raise LocalFault(f"cannot listen on {maddr}: {error}") from error
