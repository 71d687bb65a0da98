"""A Unix connection to p2pd that leaves the last byte that was read in the kernel, so that its end is a reset.

p2pd ends a libp2p stream when our connection ends: with a FIN and then a reset if we had read all its bytes, and
with the reset alone if one is left, since its own read then fails with ECONNRESET (Linux). Over QUIC a FIN that a
reset overtakes leaks: quic-go 0.40 gives the stream's place back when its reader sees the FIN, or when a reset
comes first. So the last byte of a read is only looked at here, and taken by the next read.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from atoll.p2p.transports.host_base import BUFFER_BYTES

log = logging.getLogger(__name__)
READS_AT_ONCE = 32
"""Reads of bytes that are there already, then others have a turn: p2pd may bring them as fast as we take them."""
FULL_S = 2.0
"""Seconds that a connect waits while p2pd accepts nobody: less than the deadline of an open (p2pd_host.py)."""
_BACKLOG = 128
"""Streams that p2pd handed over and that we have not accepted."""
_RETRY_S = 0.01
_ACCEPT_PAUSE_S = 1.0
_PART_BYTES = 128
"""Most that one part of a read costs beside its bytes. A peer may send a frame of 1 MiB byte by byte."""


class UnixSocket:
    """One Unix connection to p2pd, for one reading and one writing task. It reads as `asyncio.StreamReader` does.

    Every failure is an OSError. A write that was cut off is followed by no other: half of it may be on its way.
    """

    def __init__(self, raw: socket.socket) -> None:
        raw.setblocking(False)
        self._raw = raw
        self._loop = asyncio.get_running_loop()
        self._seen = 0
        """Bytes at the head of the kernel's queue that were delivered already: 0 or 1."""
        self._early = b""
        """What a read that was cancelled had taken."""
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._reads = 0
        self._is_cut = False

    @classmethod
    async def connect(cls, path: str, full_s: float = FULL_S) -> "UnixSocket":
        """Connect to the socket at `path`; wait `full_s` seconds while its queue is full. Raises OSError."""
        found = cls(socket.socket(socket.AF_UNIX))
        until_s = found._loop.time() + full_s
        try:
            while not found._is_queued(path):
                if found._loop.time() >= until_s:
                    raise ConnectionRefusedError(f"its queue was full for {full_s:g} s")
                await asyncio.sleep(_RETRY_S)
        except BaseException:
            found.abort()
            raise
        return found

    def is_closing(self) -> bool:
        """Whether our side has ended."""
        return self._raw.fileno() < 0

    async def readexactly(self, n: int) -> bytes:
        """The next `n` bytes. Raises asyncio.IncompleteReadError at the end."""
        parts, left = [self._early[:n]], n - len(self._early[:n])
        self._early = self._early[n:]
        try:
            while left > 0:
                part = await self._take(left - 1) if left > 1 or self._seen else await self._look()
                parts.append(part)
                left -= len(part)
                if len(parts) > READS_AT_ONCE and _PART_BYTES * len(parts) > n - left:
                    parts = [b"".join(parts)]
        except EOFError:
            raise asyncio.IncompleteReadError(b"".join(parts), n) from None
        except asyncio.CancelledError:
            self._early = b"".join(parts)
            raise
        return b"".join(parts)

    async def read(self, n: int) -> bytes:
        """Between 1 and `n` bytes, none of which is left in the kernel; empty at the end."""
        early, self._early = self._early[:n], self._early[n:]
        with contextlib.suppress(EOFError):
            while not early:
                early = await self._take(n)
        return early

    async def write(self, data: bytes | memoryview) -> None:
        """Hand all of `data` to the kernel, which holds about 200 kB ahead of p2pd."""
        if self._is_cut:
            raise ConnectionAbortedError("a write was cut off")
        view = memoryview(data).cast("B")
        self._is_cut = True
        while view:
            try:
                view = view[self._open().send(view) :]
            except BlockingIOError:
                await self._until_ready(self._loop.add_writer, self._loop.remove_writer, "write")
        self._is_cut = False

    def abort(self) -> None:
        """End both directions now. Idempotent."""
        if self.is_closing():
            return
        for remove in (self._loop.remove_reader, self._loop.remove_writer):
            remove(self._raw)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionAbortedError("the connection is closed"))
        self._raw.close()

    def _is_queued(self, path: str) -> bool:
        # Not the loop's `sock_connect`: it takes EAGAIN, by which Linux says that the queue is full, for success.
        try:
            self._raw.connect(path)
        except BlockingIOError:
            return False
        return True

    async def _take(self, size: int) -> bytes:
        """Up to `size` new bytes, perhaps none, after those that were seen. Raises EOFError at the end."""
        data = await self._receive(min(size, BUFFER_BYTES) + self._seen)
        seen, self._seen = self._seen, 0
        return data[seen:]

    async def _look(self) -> bytes:
        """The next byte, which stays in the kernel. Raises EOFError at the end."""
        data = await self._receive(1, socket.MSG_PEEK)
        self._seen = 1
        return data

    async def _receive(self, size: int, flags: int = 0) -> bytes:
        self._reads += 1
        if self._reads % READS_AT_ONCE == 0:
            await asyncio.sleep(0)
        while True:
            try:
                data = self._open().recv(size, flags)
            except BlockingIOError:
                await self._until_ready(self._loop.add_reader, self._loop.remove_reader, "read")
            else:
                if not data:
                    raise EOFError
                return data

    def _open(self) -> socket.socket:
        if self.is_closing():
            raise ConnectionAbortedError("the connection is closed")
        return self._raw

    async def _until_ready(
        self, add: Callable[..., object], remove: Callable[[socket.socket], object], what: str
    ) -> None:
        if what in self._waiting:
            raise RuntimeError(f"two tasks {what} at once")
        future = self._waiting[what] = self._loop.create_future()
        add(self._raw, _ready, future)
        try:
            await future
        finally:
            del self._waiting[what]
            if not self.is_closing():
                remove(self._raw)


def listen_at(path: Path) -> socket.socket:
    """A listening Unix socket at `path`, which must not exist."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.setblocking(False)
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


async def accepted(listener: socket.socket) -> list[socket.socket]:
    """All connections that wait, at least one. Raises OSError."""
    found = [(await asyncio.get_running_loop().sock_accept(listener))[0]]
    # One in each turn of a busy loop is too few: p2pd ends the streams for which the kernel has no place.
    with contextlib.suppress(OSError):  # none is left, or the next call raises it again
        while len(found) < _BACKLOG:
            found.append(listener.accept()[0])
    return found


async def take_streams(
    listener: socket.socket, group: asyncio.TaskGroup, serve: Callable[["UnixSocket"], Coroutine[Any, Any, None]]
) -> None:
    """Serve connections that p2pd opens, as tasks of `group`, until cancelled, and close `listener` then."""

    def let_go(task: "asyncio.Task[None]", found: UnixSocket) -> None:
        if task.cancelled():  # perhaps before it began, and then it closed nothing
            found.abort()

    with listener:
        while True:
            try:
                connections = await accepted(listener)
            except OSError as error:  # no descriptor is left: p2pd's connections wait in the kernel
                log.warning("no stream can be taken: %s", error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
            else:
                for found in map(UnixSocket, connections):
                    group.create_task(serve(found)).add_done_callback(partial(let_go, found=found))


def _ready(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
