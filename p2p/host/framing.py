"""Length frames on a stream: u32 little-endian size, then the bytes.

The size is compared with the caller's cap before anything is allocated.
"""

from collections.abc import Callable

from atoll.p2p.host.interface import Stream
from atoll.protocols.errors import DecodeError

PREFIX_BYTES = 4


async def read_frame(stream: Stream, max_bytes: int | Callable[[], int]) -> bytes:
    """Body of the next frame. Raises DecodeError above `max_bytes`, Unreachable when the stream ends.

    A cap that may change while we wait for the frame is a function.
    """
    size = int.from_bytes(await stream.read_exactly(PREFIX_BYTES), "little")
    cap = max_bytes if isinstance(max_bytes, int) else max_bytes()
    if size > cap:
        raise DecodeError(f"a frame of {size} bytes where at most {cap} are legal")
    return await stream.read_exactly(size) if size else b""


async def write_frame(stream: Stream, body: bytes | memoryview) -> None:
    """Write one frame. Raises Unreachable."""
    await stream.write(framed(body))


def framed(body: bytes | memoryview) -> bytes:
    """A whole frame."""
    return len(body).to_bytes(PREFIX_BYTES, "little") + body
