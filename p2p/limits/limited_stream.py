"""A stream whose bytes wait for their turn."""

from atoll.p2p.host.interface import Stream
from atoll.p2p.limits.pacer import Pacer
from atoll.p2p.limits.token_bucket import TrafficClass
from atoll.protocols.ids import PeerId


class LimitedStream:
    """See `atoll.p2p.host.interface.Stream`; `inner` does the work."""

    def __init__(self, inner: Stream, traffic: TrafficClass, up: Pacer, down: Pacer) -> None:
        self._inner = inner
        self._traffic = traffic
        self._up = up
        self._down = down
        self._unread = bytearray()
        """Read and not handed out: a reader may be cancelled while it waits for its turn."""

    @property
    def peer(self) -> PeerId:
        """The authenticated other side."""
        return self._inner.peer

    @property
    def protocol(self) -> str:
        """Protocol id that both sides agreed on."""
        return self._inner.protocol

    async def read_exactly(self, size: int) -> bytes:
        """`size` bytes. Raises Unreachable when the stream ends before, or bulk traffic stands still."""
        self._down.require(self._traffic)
        if not self._unread and self._down.piece_bytes is None:
            return await self._inner.read_exactly(size)
        while (lacking := size - len(self._unread)) > 0:
            part = await self._inner.read_exactly(min(lacking, self._down.piece_bytes or lacking))
            self._unread += part
            await self._down.take(self.peer, self._traffic, len(part))
        data = bytes(self._unread[:size])
        del self._unread[:size]
        return data

    async def write(self, data: bytes | memoryview) -> None:
        """Hand over all of `data` at the rate of the host. Raises Unreachable."""
        self._up.require(self._traffic)
        if self._up.piece_bytes is None:
            return await self._inner.write(data)
        view, start = memoryview(data).cast("B"), 0
        while start < len(view):
            part = view[start : start + (self._up.piece_bytes or len(view))]
            await self._up.take(self.peer, self._traffic, len(part))
            await self._inner.write(part)
            start += len(part)

    async def close(self) -> None:
        """End our side in good order. Idempotent."""
        await self._inner.close()

    def reset(self) -> None:
        """Drop the stream now. Idempotent."""
        self._inner.reset()
