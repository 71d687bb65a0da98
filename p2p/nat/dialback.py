"""The probe of a dial-back: a fresh socket finds out whether a libp2p node answers at an address.

TCP: the multistream-select header. QUIC: a long-header packet of a version that nobody speaks is answered with
Version Negotiation (RFC 9000 §6), which costs the other side nothing. No identity is proved: a later
dial checks that.
"""

import asyncio
import contextlib
import os
from typing import Final

from atoll.p2p.host.framing import check_open
from atoll.p2p.host.maddrs import endpoint_of
from atoll.protocols.errors import Unreachable

PROBE_S: Final = 3.0
MULTISTREAM: Final = b"\x13/multistream/1.0.0\n"
_UDP_TRIES: Final = 3
_GREASE_VERSION: Final = bytes.fromhex("1a2a3a4a")
_MIN_INITIAL_BYTES: Final = 1200


async def answers(maddr: str) -> bool:
    """Whether a node answers at `maddr`; False for a kind of address that we cannot probe."""
    endpoint = endpoint_of(maddr)
    if endpoint is None:
        return False
    if endpoint.transport == "tcp":
        return await read_banner(endpoint.ip, endpoint.port) == MULTISTREAM
    return await speaks_quic(endpoint.ip, endpoint.port)


async def read_banner(host: str, number: int) -> bytes:
    """The first 20 bytes of a TCP server's reply to multistream's greeting; none if they take over PROBE_S."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(PROBE_S):
            reader, writer = await asyncio.open_connection(host, number)
            try:
                check_open(writer)
                writer.write(MULTISTREAM)
                return await reader.readexactly(len(MULTISTREAM))
            except asyncio.IncompleteReadError as ended:
                return ended.partial
            finally:
                # Aborted: a polite close would leave sockets in TIME_WAIT, one for each probe that peers ask for.
                writer.transport.abort()
    return b""


class _FirstDatagram(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self.received: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def datagram_received(self, data: bytes, addr: object) -> None:
        if not self.received.done():
            self.received.set_result(data)

    def error_received(self, exc: Exception) -> None:
        if not self.received.done():
            self.received.set_exception(Unreachable(str(exc)))


async def speaks_quic(host: str, number: int) -> bool:
    """Whether a QUIC server rejects an unknown version within PROBE_S; the probe is sent three times."""
    with contextlib.suppress(OSError, TimeoutError, Unreachable):
        async with asyncio.timeout(PROBE_S):
            return await _negotiates(host, number)
    return False


async def _negotiates(host: str, number: int) -> bool:
    loop = asyncio.get_running_loop()
    # A new socket, so a new port: from our listen port the packets would pass a hole that the peer made for us.
    transport, answer = await loop.create_datagram_endpoint(_FirstDatagram, remote_addr=(host, number))
    ids = os.urandom(16)
    # Padded to 1200 bytes, because servers ignore shorter first packets (RFC 9000 §14.1).
    head = b"\xc0" + _GREASE_VERSION + b"\x08" + ids[:8] + b"\x08" + ids[8:]
    try:
        for _ in range(_UDP_TRIES):
            transport.sendto(head + bytes(_MIN_INITIAL_BYTES - len(head)))
            done, _ = await asyncio.wait((answer.received,), timeout=PROBE_S / (_UDP_TRIES + 1))
            if done:
                return _is_version_negotiation(answer.received.result(), ids)
        return False
    finally:
        transport.close()


def _is_version_negotiation(data: bytes, ids: bytes) -> bool:
    """Version 0, and our connection ids the other way round."""
    swapped = b"\x08" + ids[8:] + b"\x08" + ids[:8]
    return len(data) >= 23 and data[0] & 0x80 == 0x80 and data[1:5] == bytes(4) and data[5:23] == swapped
