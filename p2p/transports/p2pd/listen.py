"""Listen addresses: a check that their ports are free, and the port that 0 became."""

import errno
import socket

from multiaddr import Multiaddr

from atoll.p2p.host.endpoint import endpoint_of
from atoll.protocols.errors import LocalFault


def with_port(maddr: str, actual: tuple[str, ...]) -> str:
    """Return `maddr` with port 0 replaced by the port that p2pd listens on."""
    wanted = endpoint_of(maddr)
    if wanted is None or wanted.port:
        return maddr
    for found in filter(None, map(endpoint_of, actual)):
        if (found.is_ip6, found.transport) == (wanted.is_ip6, wanted.transport):
            return maddr.replace(f"/{wanted.transport}/0", f"/{wanted.transport}/{found.port}")
    return maddr


def require_free(maddrs: tuple[str, ...]) -> None:
    """Raise LocalFault when another program listens at one of `maddrs`.

    go-libp2p sets SO_REUSEPORT: a second p2pd of the same user would start and steal connections.
    """
    for maddr in maddrs:
        try:
            Multiaddr(maddr)
        except Exception as error:  # multiaddr raises a dozen kinds
            raise LocalFault(
                f"not a listen address: {maddr}", hint="for instance /ip4/0.0.0.0/tcp/4001"
            ) from error
        place = endpoint_of(maddr)
        if place is None or not place.port:
            continue
        family = socket.AF_INET6 if place.is_ip6 else socket.AF_INET
        kind = socket.SOCK_STREAM if place.transport == "tcp" else socket.SOCK_DGRAM
        with socket.socket(family, kind) as probe:
            if kind == socket.SOCK_STREAM:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((place.ip, place.port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise LocalFault(
                        f"port {place.port} is in use", hint="choose another port or stop the other program"
                    ) from error
                raise LocalFault(f"cannot listen on {maddr}: {error}") from error
