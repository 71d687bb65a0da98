"""Frames on a pipe: `u32 length (little endian)` + canonical msgpack.

Between daemon and worker, and between a worker and the processes of its other devices.
"""

import contextlib
import os
import select
from typing import Any, cast

from atoll.p2p.host.framing import PREFIX_BYTES, frame_size, framed
from atoll.protocols import codec
from atoll.protocols.errors import LocalFault
from atoll.protocols.local.worker_messages import FRAME_MAX_BYTES, ReplyEnvelope, RequestEnvelope

PIPE_BYTES = 65536


def frame(message: Any) -> bytes:
    """The bytes of one message, with its length in front. Raises LocalFault above the cap."""
    body = codec.encode(message)
    if len(body) > FRAME_MAX_BYTES:
        raise LocalFault(f"a worker message of {len(body)} bytes; at most {FRAME_MAX_BYTES} fit")
    return framed(body)


def read_frame(fd: int, kind: Any) -> Any:
    """Wait for the next message, of type `kind`; None when the other side is gone. Raises DecodeError."""
    prefix = _exactly(fd, PREFIX_BYTES)
    if prefix is None:
        return None
    body = _exactly(fd, frame_size(prefix, FRAME_MAX_BYTES))
    return None if body is None else codec.decode(body, kind, max_bytes=FRAME_MAX_BYTES, any_float=True)


def _exactly(fd: int, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(fd, size - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)


class Inbox:
    """The worker's end for requests: blocking, or polled between two inner steps."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._waker, False)

    def wake(self) -> None:
        """End a `wait`, the next one if none is under way. Any thread may call it."""
        with contextlib.suppress(BlockingIOError):  # it is full of calls already
            os.write(self._waker, b"!")

    def wait(self) -> bool:
        """Until `receive` would find something at once (True), or until `wake` (False)."""
        readable, _, _ = select.select([self._fd, self._woken], [], [])
        if self._woken in readable:
            os.read(self._woken, PIPE_BYTES)
        return self._fd in readable

    def has_request(self) -> bool:
        """Whether `receive` would find a request (or the daemon's end) at once."""
        return bool(select.select([self._fd], [], [], 0)[0])

    def receive(self) -> RequestEnvelope | None:
        """Wait for the next request; None when the daemon is gone."""
        return cast(RequestEnvelope | None, read_frame(self._fd, RequestEnvelope))


class ReplyWriter:
    """The worker's end for replies."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def send(self, reply: ReplyEnvelope) -> None:
        """Write one reply completely. Raises BrokenPipeError when the daemon is gone."""
        rest = memoryview(frame(reply))
        while rest:
            rest = rest[os.write(self._fd, rest) :]
