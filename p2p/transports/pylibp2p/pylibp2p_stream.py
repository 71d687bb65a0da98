"""One stream of py-libp2p for asyncio users: bytes wait in two bounded buffers, trio carries them.

Both halves run in one thread (`trio_bridge`), so they share these objects without locks. A cancellation in
asyncio ends a wait, never a transfer: what was handed over is still sent, what arrived is still there.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Final, cast

import trio
from libp2p.io.exceptions import IOException

from atoll.p2p.transports.host_base import BUFFER_BYTES, ReaderStream, StreamRegistry
from atoll.p2p.transports.pylibp2p.yamux import Lane
from atoll.protocols.errors import Unreachable
from atoll.protocols.ids import PeerId

_END_S: Final = 60.0
"""After our end a peer has so long to read what we sent and to end its side; then it is reset."""


class PyLibp2pStream(ReaderStream):
    """See `atoll.p2p.host.interface.Stream`; `carry` is trio's half."""

    _reader: asyncio.StreamReader

    def __init__(
        self, peer: PeerId, protocol: str, registry: StreamRegistry, lane: Lane, *, initiator: bool
    ) -> None:
        super().__init__(peer, protocol, registry, initiator=initiator)
        self._lane = lane
        self._flow = _InboundFlow()
        self._reader = asyncio.StreamReader(limit=BUFFER_BYTES, loop=asyncio.get_running_loop())
        self._reader.set_transport(cast(asyncio.Transport, self._flow))
        self._outbox: deque[bytes] = deque()
        self._queued = 0
        self._moved = asyncio.Event()
        self._has_work = trio.Event()
        self._finishing = False
        """To be ended in order."""
        self._dropped = False
        """Whether the stream is to be reset."""
        self._broken = False
        """The peer ended: nothing can be sent any more."""
        self._carried = False
        """Trio has sent our end."""

    async def write(self, data: bytes | memoryview) -> None:
        """Hand over all of `data`, at most BUFFER_BYTES ahead of trio. Raises Unreachable."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), BUFFER_BYTES):
            await self._wait_for(lambda: self._queued < BUFFER_BYTES)
            if self._ended or self._broken:
                raise Unreachable("stream is closed")
            part = bytes(view[start : start + BUFFER_BYTES])
            self._outbox.append(part)
            self._queued += len(part)
            self._registry.bytes_up += len(part)
            self._has_work.set()

    async def close(self) -> None:
        """End our side in good order; a stream that is broken already is only dropped."""
        if self._ended:
            return
        try:
            await self._wait_for(lambda: not self._queued)
            if not self._initiator:
                with contextlib.suppress(TimeoutError):
                    await self._linger()
            self._finishing = not self._queued
            self._finish()
            self._has_work.set()
            await self._wait_for(lambda: self._carried)
        finally:
            self.reset()

    def reset(self) -> None:
        """Drop the stream now."""
        self._finish()
        self._dropped = self._dropped or not self._finishing
        if self._dropped:
            self._lane.give_up()
        self._reader.feed_eof()
        self._flow.resume_reading()
        self._moved.set()
        self._has_work.set()

    async def carry(self) -> None:
        """Move bytes both ways, in trio, until the stream is over."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._carry_in)
                await self._carry_out()
                self._carried = True
                self._moved.set()
                nursery.cancel_scope.deadline = trio.current_time() + _END_S
        finally:
            self._broken = self._carried = True
            self._reader.feed_eof()
            self._moved.set()
            with trio.CancelScope(shield=True):
                await self._lane.drop()

    async def _carry_in(self) -> None:
        """Receive until the peer's end; after our own end what still arrives is dropped."""
        while data := await self._lane.receive():
            if self._dropped or self._finishing:
                continue
            self._reader.feed_data(data)
            await self._flow.open.wait()
            await self._lane.grant(len(data))
        self._broken = True
        self._reader.feed_eof()
        self._moved.set()

    async def _carry_out(self) -> None:
        while not self._dropped:
            self._has_work = trio.Event()
            try:
                if self._outbox:
                    await self._send(self._outbox.popleft())
                elif self._finishing:
                    return await self._lane.finish()
                else:
                    await self._has_work.wait()
            except IOException:
                self._dropped = True
        self._outbox.clear()
        await self._lane.drop()

    async def _send(self, part: bytes) -> None:
        await self._lane.write(part)
        self._queued -= len(part)
        self._moved.set()

    async def _wait_for(self, done: Callable[[], bool]) -> None:
        """Wait for `done` or for the end of the stream."""
        while not (done() or self._broken or self._dropped):
            self._moved.clear()
            await self._moved.wait()


class _InboundFlow:
    """The transport of asyncio's reader, which pauses it while it holds enough; trio reads no more then."""

    def __init__(self) -> None:
        self.open = trio.Event()
        self.open.set()

    def pause_reading(self) -> None:
        """asyncio: the buffer is full."""
        self.open = trio.Event()

    def resume_reading(self) -> None:
        """asyncio: there is room."""
        self.open.set()
