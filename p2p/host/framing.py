"""Length frames: a body's size as u32 little-endian, then the body.

Streams between peers and the pipes of child processes use them. The size is compared with the caller's cap before
anything is allocated. `check_open` comes before each write to a stream of asyncio.
"""

import asyncio
from collections.abc import Callable

from atoll.p2p.host.interface import Stream
from atoll.protocols.errors import DecodeError

PREFIX_BYTES = 4
"""Bytes of the size in front of each body."""


def size_prefix(size: int) -> bytes:
    """The four bytes that announce a body of `size` bytes."""
    return size.to_bytes(PREFIX_BYTES, "little")


def framed(body: bytes | memoryview) -> bytes:
    """One whole frame: the size prefix, then `body`."""
    return size_prefix(len(body)) + body


def frame_size(prefix: bytes, max_bytes: int) -> int:
    """Size in bytes of the body that follows `prefix`. Raises DecodeError above `max_bytes`."""
    size = int.from_bytes(prefix, "little")
    if size > max_bytes:
        raise DecodeError(f"a frame of {size} bytes where at most {max_bytes} are legal")
    return size


def check_open(writer: asyncio.StreamWriter) -> None:
    """Raise ConnectionResetError where the connection is lost already.

    On a transport that is closed uvloop raises RuntimeError, which nobody handles, and the loop of asyncio drops
    the bytes.
    """
    if writer.is_closing():
        raise ConnectionResetError("the connection is closed")


async def read_frame(stream: Stream, max_bytes: int | Callable[[], int]) -> bytes:
    """Body of the next frame. Raises DecodeError above `max_bytes`, Unreachable when the stream ends.

    A function as cap is called after the prefix has arrived: the cap may change while the reader waits.
    """
    prefix = await stream.read_exactly(PREFIX_BYTES)
    size = frame_size(prefix, max_bytes if isinstance(max_bytes, int) else max_bytes())
    return await stream.read_exactly(size) if size else b""


async def write_frame(stream: Stream, body: bytes | memoryview) -> None:
    """Write `body` as one frame. Raises Unreachable."""
    await stream.write(framed(body))
