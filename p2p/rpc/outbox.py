"""The outbox of one stream of the calls wire: it joins frames into few writes, and counts what is not taken."""

import asyncio
from collections import deque
from collections.abc import Callable

from atoll.p2p.host.framing import PART_S, framed, write_in_parts
from atoll.p2p.host.interface import Stream
from atoll.protocols.errors import Unreachable

NOTICES_QUEUED = 256
"""Most notices queued to one peer; then the oldest is dropped."""
NOTICES_QUEUED_BYTES = 1024 * 1024
QUEUED_BYTES = 1024 * 1024
"""Bytes of requests or replies queued to one peer at which no more are accepted."""
_WRITE_BYTES = 64 * 1024
"""Most bytes of short frames, and most of notices, in one write: a joined copy stays small."""


class NoticeQueue:
    """A bounded queue of notices; a full queue drops its oldest notice."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._bytes = 0

    def put(self, frame: bytes) -> None:
        """Queue one frame."""
        self._frames.append(frame)
        self._bytes += len(frame)
        while len(self._frames) > NOTICES_QUEUED or self._bytes > NOTICES_QUEUED_BYTES:
            self._pop()

    def take(self, max_bytes: int) -> list[bytes]:
        """Remove and return the oldest frames, about `max_bytes` together."""
        taken: list[bytes] = []
        size = 0
        while self._frames and size < max_bytes:
            taken.append(self._pop())
            size += len(taken[-1])
        return taken

    def drop_all(self) -> None:
        """Drop every queued notice: the stream is gone."""
        self._frames.clear()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._frames)

    def _pop(self) -> bytes:
        frame = self._frames.popleft()
        self._bytes -= len(frame)
        return frame


class Backlog:
    """Bytes that one peer makes this node hold, over all its streams."""

    def __init__(self, on_change: Callable[[int], None] = lambda size_bytes: None) -> None:
        """`on_change` receives each difference."""
        self.bytes = 0
        self._on_change = on_change
        self._has_room = asyncio.Event()

    @property
    def has_room(self) -> bool:
        """Whether there are less than QUEUED_BYTES."""
        return self.bytes < QUEUED_BYTES

    def change(self, size_bytes: int) -> None:
        """So many bytes more, or fewer."""
        self.bytes += size_bytes
        if self.bytes < QUEUED_BYTES:
            self._has_room.set()
        self._on_change(size_bytes)

    async def room(self) -> None:
        """Wait until there are less than QUEUED_BYTES."""
        while self.bytes >= QUEUED_BYTES:  # of those that waited, the first may have filled it again
            self._has_room.clear()
            await self._has_room.wait()


class FrameOutbox:
    """Queue of frames to one stream: short frames queued in one turn of the event loop leave in one write.

    Senders wait for `backlog.room` first, so a peer that sends but does not read cannot make the queue grow.
    """

    def __init__(self, backlog: Backlog | None = None) -> None:
        """`backlog`: that of the peer, where it has several streams."""
        self.backlog = backlog or Backlog()
        self.bytes = 0
        """Bytes of requests and replies that the stream has not taken yet."""
        self.taken_s = 0.0
        """When the stream last took something while frames waited, on the clock of the event loop."""
        self._frames: deque[bytes] = deque()
        self._stream: Stream | None = None
        self.is_finished = False
        """Whether nothing is sent any more."""
        self._wake = asyncio.Event()
        self.notices = NoticeQueue()

    def put(self, frame: bytes) -> None:
        """Queue a request, a reply, a failure or a cancel."""
        if self.is_finished:
            return
        if not self.bytes:
            self._note_taken()
        self._frames.append(framed(frame))
        self._count(len(self._frames[-1]))
        self._wake.set()

    def put_notice(self, frame: bytes) -> None:
        """Queue a notice behind everything else."""
        self.notices.put(framed(frame))
        self._wake.set()
        if self.is_finished:
            self.notices.drop_all()

    async def drain(self, stream: Stream) -> None:
        """Write queued frames until cancelled or until the stream breaks; then reset the stream."""
        self._stream = stream
        try:
            while True:
                size_bytes, data = self._take()
                if not data:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                await write_in_parts(stream, data, PART_S, on_part=self._note_taken)
                self._count(-min(size_bytes, self.bytes))  # none are left of an outbox that was finished meanwhile
        except Unreachable:
            stream.reset()
        finally:
            self.finish()

    def finish(self) -> None:
        """Drop all frames, so that nobody waits for room: the stream is gone. Idempotent."""
        self.is_finished = True
        self._frames.clear()
        self._count(-self.bytes)
        self.notices.drop_all()

    def break_off(self) -> None:
        """Drop all frames and end the stream."""
        self.finish()
        if self._stream is not None:
            self._stream.reset()

    def _note_taken(self, size_bytes: int = 0) -> None:
        self.taken_s = asyncio.get_running_loop().time()

    def _count(self, size_bytes: int) -> None:
        self.bytes += size_bytes
        self.backlog.change(size_bytes)

    def _take(self) -> tuple[int, bytes]:
        """What is written next, and how many bytes of it are no notices; these count until they are taken."""
        batch: list[bytes] = []
        size_bytes = 0
        while self._frames and (not batch or size_bytes + len(self._frames[0]) <= _WRITE_BYTES):
            batch.append(self._frames.popleft())
            size_bytes += len(batch[-1])
        batch += self.notices.take(_WRITE_BYTES)
        return size_bytes, batch[0] if len(batch) == 1 else b"".join(batch)
