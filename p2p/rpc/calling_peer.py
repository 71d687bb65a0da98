"""A peer that calls us: the limits that its streams share, and which of its streams gives way."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from atoll.p2p.rpc.call_stream import IN_FLIGHT
from atoll.p2p.rpc.outbox import Backlog, FrameOutbox
from atoll.p2p.rpc.turns import Share
from atoll.protocols.errors import Unreachable
from atoll.protocols.ids import PeerId

SUPERSEDED_S = 3.0
"""A stream that took nothing for so many seconds gives way to a newer one of its peer. A peer opens a new stream
when its old one is lost; as its pings have 3 s each (p2p/membership/liveness.py), it would soon hang up."""
_LOOK_S = 0.5


class CallingPeer:
    """A peer that calls us; its streams share one limit of requests in flight, and of bytes."""

    def __init__(self, peer: PeerId, on_unread: Callable[[int], None]) -> None:
        """`on_unread` receives each difference of `unread`, in bytes."""
        self.peer = peer
        self.slots = asyncio.Semaphore(IN_FLIGHT)
        self.streams = 0
        self.outboxes: list[FrameOutbox] = []
        """One for each stream that said Hello, the oldest first."""
        self.asked = Backlog()
        """Requests that are not answered yet."""
        self.unread = Backlog(on_unread)
        """Replies that are not taken yet."""
        self.large = asyncio.Lock()
        self.share = Share()

    async def room(self, outbox: FrameOutbox) -> None:
        """Wait until one more request may be read from the stream of `outbox`.

        Meanwhile older streams that took nothing for SUPERSEDED_S end: the line of such a stream is dead, and its
        replies would keep the new one deaf. Raises Unreachable where the stream itself gave way.
        """
        while not (self.asked.has_room and self.unread.has_room):
            self._end_superseded(outbox)
            if outbox.is_finished:
                raise Unreachable("the peer has a newer stream")
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self.asked.room()
                    await self.unread.room()

    def _end_superseded(self, newer: FrameOutbox) -> None:
        now_s = asyncio.get_running_loop().time()
        for older in self.outboxes[: self.outboxes.index(newer)]:
            if older.bytes and now_s - older.taken_s >= SUPERSEDED_S:
                older.break_off()
