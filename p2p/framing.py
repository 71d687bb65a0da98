"""Length frames on a stream: u32 little-endian size, then the bytes.

The size is compared with the caller's cap before anything is allocated.
"""

from atoll.p2p.host import Stream
from atoll.protocols.errors import DecodeError

PREFIX_BYTES = 4


async def read_frame(stream: Stream, max_bytes: int) -> bytes:
    """Body of the next frame. Raises DecodeError above `max_bytes`, Unreachable when the stream ends."""
    size = int.from_bytes(await stream.read_exactly(PREFIX_BYTES), "little")
    if size > max_bytes:
        raise DecodeError(f"a frame of {size} bytes where at most {max_bytes} are legal")
    return await stream.read_exactly(size) if size else b""


async def write_frame(stream: Stream, body: bytes | memoryview) -> None:
    """Write one frame. Raises Unreachable."""
    await stream.write(framed(body))


def framed(body: bytes | memoryview) -> bytes:
    """A whole frame."""
    return len(body).to_bytes(PREFIX_BYTES, "little") + body
