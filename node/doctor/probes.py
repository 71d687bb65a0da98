"""Probes of an unknown port: whether it speaks multistream over TCP, or QUIC over UDP."""

import asyncio
import os

UDP_S = 3.0
ANSWER_S = 4.0
_QUIC_BYTES = 1200
"""Size of the first datagram; a server ignores smaller ones (RFC 9000, 14.1)."""
_NO_VERSION = bytes.fromhex("1a2a3a4a")
"""A version reserved to provoke a Version Negotiation packet (RFC 9000, 15)."""
MULTISTREAM = b"\x13/multistream/1.0.0\n"


async def read_banner(host: str, number: int) -> bytes:
    """A TCP server's reply to multistream's greeting, at most 64 bytes; empty if there is none in ANSWER_S."""
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(host, number)
            try:
                writer.write(MULTISTREAM)
                return await reader.read(64)
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError):
        return b""


class _Probe(asyncio.DatagramProtocol):
    """Sets a future at the first Version Negotiation packet."""

    def __init__(self, answered: "asyncio.Future[bool]") -> None:
        self._answered = answered

    def datagram_received(self, data: bytes, addr: object) -> None:
        """Called by asyncio. The packet has a long header and version 0 (RFC 9000, 17.2.1)."""
        if data[:1] >= b"\x80" and data[1:5] == bytes(4) and not self._answered.done():
            self._answered.set_result(True)

    def error_received(self, exc: Exception) -> None:
        """Called by asyncio for an ICMP error; it is ignored, because the deadline decides."""


async def speaks_quic(host: str, number: int) -> bool:
    """Whether a QUIC server rejects an unknown version within UDP_S seconds; the probe is sent three times."""
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[bool] = loop.create_future()
    try:
        transport, _ = await loop.create_datagram_endpoint(lambda: _Probe(answered), remote_addr=(host, number))
    except OSError:
        return False
    head = b"\xc0" + _NO_VERSION + b"\x08" + os.urandom(8) + b"\x08" + os.urandom(8)
    try:
        for _ in range(3):
            transport.sendto(head.ljust(_QUIC_BYTES, b"\0"))
            await asyncio.wait((answered,), timeout=UDP_S / 3)
            if answered.done():
                return True
        return False
    finally:
        transport.close()
