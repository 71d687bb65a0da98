"""Where this node listens: one port for TCP and QUIC, the same after a restart.

A router keeps its mapping, and peers their cached address, only while the port stays the same; and a hole that was
punched through a router opens the port that QUIC dials from, which is the one that it listens on.
"""

import random
import socket
from collections.abc import Sequence
from pathlib import Path

from atoll.p2p.system.atomic_files import read_whole, write_whole
from atoll.p2p.transports.p2pd.listen import require_free
from atoll.protocols.errors import CorruptFault, LocalFault

_FIRST, _LAST = 20_000, 60_000
_TRIES = 200


def listen_maddrs(wanted: Sequence[str], port: int, remembered: Path) -> tuple[str, ...]:
    """What to listen on: `wanted` as it is, else every interface at `port`, by TCP and QUIC.

    Port 0: the one in the file `remembered` while it is free, else a free one, which is written there. Raises
    DiskFault; LocalFault when no port is free.
    """
    if wanted:
        return tuple(wanted)
    number = port or _kept(remembered) or _picked(remembered)
    both = tuple(f"/{ip}/{place}" for ip in ("ip4/0.0.0.0", *_ip6()) for place in _places(number))
    return both


def _places(port: int) -> tuple[str, str]:
    return f"tcp/{port}", f"udp/{port}/quic-v1"


def _ip6() -> tuple[str, ...]:
    """`ip6/::` where this machine speaks IPv6."""
    if not socket.has_ipv6:
        return ()
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return ()
    return ("ip6/::",)


def _kept(remembered: Path) -> int:
    try:
        data = (read_whole(remembered, max_bytes=32) or b"").strip()
    except CorruptFault:
        return 0
    port = int(data) if data.isdigit() else 0
    return port if 0 < port < 65536 and _is_free(port) else 0


def _picked(remembered: Path) -> int:
    luck = random.SystemRandom()
    for _ in range(_TRIES):
        port = luck.randrange(_FIRST, _LAST)
        if _is_free(port):
            write_whole(remembered, b"%d\n" % port)
            return port
    raise LocalFault(f"no free port between {_FIRST} and {_LAST}", hint="choose one with --port")


def _is_free(port: int) -> bool:
    """Nobody listens on `port`, by TCP or UDP. Another program may still take it before us."""
    try:
        require_free(tuple(f"/ip4/0.0.0.0/{place}" for place in _places(port)))
    except LocalFault:
        return False
    return True
