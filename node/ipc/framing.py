"""Frames on a pipe: `u32 length (little endian)` + canonical msgpack.

Between daemon and worker, and between a worker and the processes of its other devices.
"""

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from atoll.p2p.host.framing import PREFIX_BYTES, frame_size, framed
from atoll.protocols import codec
from atoll.protocols.errors import DecodeError, LocalFault
from atoll.protocols.local.worker_messages import FRAME_MAX_BYTES, ReplyEnvelope, RequestEnvelope


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
    """The worker's end for requests: waited for, or polled between two inner steps. A thread reads them."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._news = threading.Condition()
        self._arrived = deque[RequestEnvelope | DecodeError | None]()
        self._is_woken = False
        self._is_answered: Callable[[RequestEnvelope], bool] = lambda request: False
        threading.Thread(target=self._read_all, name="inbox", daemon=True).start()

    def answer_beside(self, is_answered: Callable[[RequestEnvelope], bool]) -> None:
        """Call this with each request as it arrives, in the reading thread: `receive` returns no answered one."""
        self._is_answered = is_answered

    def wake(self) -> None:
        """End a `wait`, the next one if none is under way. Any thread may call it."""
        with self._news:
            self._is_woken = True
            self._news.notify()

    def wait(self) -> bool:
        """Until `receive` would find something at once (True), or until `wake` (False)."""
        with self._news:
            self._news.wait_for(lambda: self._is_woken or bool(self._arrived))
            self._is_woken = False
            return bool(self._arrived)

    def has_request(self) -> bool:
        """Whether `receive` would find a request (or the daemon's end) at once."""
        return bool(self._arrived)

    def receive(self) -> RequestEnvelope | None:
        """Wait for the next request; None when the daemon is gone. Raises DecodeError."""
        with self._news:
            self._news.wait_for(lambda: bool(self._arrived))
            first = self._arrived[0]
            if isinstance(first, RequestEnvelope):
                self._arrived.popleft()
        # The end stays, and so do bytes that are no request: nothing comes after them.
        if isinstance(first, DecodeError):
            raise first
        return first

    def _read_all(self) -> None:
        last: DecodeError | None = None
        try:
            while (request := read_frame(self._fd, RequestEnvelope)) is not None:
                if not self._is_answered(request):
                    self._put(request)
        except DecodeError as error:
            last = error
        finally:  # after a bug too, whose traceback is in the log: who receives would wait for ever
            self._put(last)

    def _put(self, one: RequestEnvelope | DecodeError | None) -> None:
        with self._news:
            self._arrived.append(one)
            self._news.notify()


class ReplyWriter:
    """The worker's end for replies, of any thread."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._one_at_a_time = threading.Lock()

    def send(self, reply: ReplyEnvelope) -> None:
        """Write one reply completely. Raises BrokenPipeError when the daemon is gone."""
        rest = memoryview(frame(reply))
        with self._one_at_a_time:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
