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
PART_BYTES = 64 * 1024
PART_S = 60.0
"""A peer sends or takes PART_BYTES, or what is left, in so many seconds: 1.1 kB/s, a seventh of 64 kbit/s."""


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


async def read_frame(stream: Stream, max_bytes: int | Callable[[], int], part_s: float | None = None) -> bytes:
    """Body of the next frame. Raises DecodeError above `max_bytes`, Unreachable when the stream ends.

    A function as cap is called after the prefix has arrived: the cap may change while the reader waits. `part_s`:
    a stream may be silent between frames; once one has begun, each PART_BYTES of it have so many seconds, or
    Unreachable is raised. None: the caller has a deadline.
    """
    prefix = await stream.read_exactly(PREFIX_BYTES)
    size = frame_size(prefix, max_bytes if isinstance(max_bytes, int) else max_bytes())
    if part_s is None:
        return await stream.read_exactly(size) if size else b""
    parts = []
    for start in range(0, size, PART_BYTES):
        late = _reset_later(stream, part_s)
        try:
            parts.append(await stream.read_exactly(min(PART_BYTES, size - start)))
        finally:
            late.cancel()
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def write_frame(stream: Stream, body: bytes | memoryview) -> None:
    """Write `body` as one frame. Raises Unreachable."""
    await stream.write(framed(body))


async def write_in_parts(
    stream: Stream,
    data: bytes | memoryview,
    part_s: float,
    *,
    part_bytes: int = PART_BYTES,
    on_part: Callable[[int], None] = lambda size_bytes: None,
) -> None:
    """Write `data`; each part must be taken within `part_s` seconds. Raises Unreachable.

    `on_part` receives the size of each part that was taken. A deadline for all of it would cut off slow lines, or
    be so long that a peer that reads a byte a second makes us hold large answers.
    """
    view = memoryview(data)
    for start in range(0, len(view), part_bytes):
        part = view[start : start + part_bytes]
        late = _reset_later(stream, part_s)
        try:
            await stream.write(part)
        finally:
            late.cancel()
        on_part(len(part))


def _reset_later(stream: Stream, seconds: float) -> asyncio.TimerHandle:
    # A stream that is reset wakes its own reader and writer. `asyncio.timeout` costs four times as much, and every
    # frame of a call has two.
    return asyncio.get_running_loop().call_later(seconds, stream.reset)
