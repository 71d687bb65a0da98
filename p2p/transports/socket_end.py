"""What streams over an asyncio reader share: counted reads, and a responder's wait for the initiator's end."""

import asyncio

from atoll.p2p.transports.inbound_stream import LINGER_BYTES, LINGER_S
from atoll.protocols.errors import Unreachable

_READ_BYTES = 256 * 1024


class ByteCounter:
    """Payload bytes over all streams of one host."""

    def __init__(self) -> None:
        self.up = 0
        self.down = 0


async def read_counted(reader: asyncio.StreamReader, size: int, traffic: ByteCounter) -> bytes:
    """`size` bytes. Raises Unreachable when the stream ends before."""
    try:
        data = await reader.readexactly(size)
    except asyncio.IncompleteReadError as error:
        raise Unreachable(f"stream ended {size - len(error.partial)} bytes early") from error
    except OSError as error:
        raise Unreachable(f"stream broke: {error}") from error
    traffic.down += size
    return data


async def read_over(reader: asyncio.StreamReader) -> None:
    """Wait for the initiator's end, reading over a bounded rest. Raises TimeoutError after LINGER_S."""
    left = LINGER_BYTES
    async with asyncio.timeout(LINGER_S):
        while left > 0 and (data := await reader.read(_READ_BYTES)):
            left -= len(data)
