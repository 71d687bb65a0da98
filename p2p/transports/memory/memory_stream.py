"""One stream of the simulated network: two bounded pipes with the same rules as p2pd's streams.

No half-close; an end and a reset look the same to the other side; the responder's `close` waits for the
initiator's end.
"""

import asyncio
import contextlib
from collections.abc import Callable

from atoll.p2p.transports.host_base import LINGER_BYTES, LINGER_S, StreamBase, StreamRegistry
from atoll.protocols.errors import Unreachable
from atoll.protocols.ids import PeerId

WINDOW_BYTES = 1024 * 1024
"""Bytes of one direction of one stream that are on the way or unread; then the writer waits."""
PART_BYTES = 64 * 1024
"""Streams that share a link take turns in parts of this size."""

Send = Callable[[int, Callable[[], None]], None]
"""(bytes on the link, action at the other end)."""


class MemoryStream(StreamBase):
    """See `atoll.p2p.host.interface.Stream`. `partner` is the same stream as the other side holds it."""

    def __init__(
        self, peer: PeerId, protocol: str, registry: StreamRegistry, send: Send, *, initiator: bool
    ) -> None:
        super().__init__(peer, protocol, registry, initiator=initiator)
        self._send = send
        self._partner_ended = False
        self._unread = bytearray()
        self._wanted = 0
        self._unacknowledged = 0
        self._readable = asyncio.Event()
        """Bytes came, or an end: readers wait for it."""
        self._writable = asyncio.Event()
        """The other side reads, or an end: writers wait for it."""
        self.partner: MemoryStream | None = None

    async def read_exactly(self, size: int) -> bytes:
        """Read `size` bytes. Raises Unreachable when the stream ends before."""
        self._wanted = size
        self._partner_changed()  # a read beyond the window makes room for its writer
        try:
            while len(self._unread) < size:
                self._require_open(reading=True)
                await self._readable.wait()
            if self._ended:
                raise Unreachable("stream is closed")
        finally:
            self._wanted = 0
        data = bytes(self._unread[:size])
        self._consume(size)
        return data

    async def write(self, data: bytes | memoryview) -> None:
        """Hand over all of `data`, waiting for room in the window. Raises Unreachable."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PART_BYTES):
            part = bytes(view[start : start + PART_BYTES])
            while self._room() <= 0:
                self._require_open(reading=False)
                await self._writable.wait()
            self._require_open(reading=False)
            self._unacknowledged += len(part)
            self._registry.bytes_up += len(part)
            self._post(part)
        # Not readiness: like a socket's drain, a write gives other tasks a turn.
        await asyncio.sleep(0)

    async def close(self) -> None:
        """End our side in good order. Idempotent."""
        if self._ended:
            return
        try:
            if not self._initiator:
                with contextlib.suppress(TimeoutError):
                    await self._linger()
        finally:
            self.reset()

    def reset(self) -> None:
        """Drop the stream now. Idempotent."""
        partner = self.partner
        if not self._ended and partner is not None:
            self._send(0, partner.on_partner_ended)
        self.break_off()

    def break_off(self) -> None:
        """End the stream on this side without a message to the other side."""
        if not self._ended:
            self._finish()
            self._wake_all()

    def deliver(self, part: bytes) -> None:
        """Store bytes that arrive."""
        if not self._ended:
            self._unread += part
            _wake(self._readable)

    def on_partner_ended(self) -> None:
        """Record that the other side ended or reset; what it wrote before can still be read."""
        self._partner_ended = True
        self._wake_all()

    def _wake_all(self) -> None:
        _wake(self._readable)
        _wake(self._writable)

    def _post(self, part: bytes) -> None:
        partner = self.partner
        assert partner is not None  # a stream is handed out when it has one
        self._send(len(part), lambda: partner.deliver(part))

    def _room(self) -> int:
        wanted = self.partner._wanted if self.partner is not None else 0
        return max(WINDOW_BYTES, wanted) - self._unacknowledged

    def _consume(self, size: int) -> None:
        del self._unread[:size]
        self._registry.bytes_down += size
        if self.partner is not None:
            self.partner._unacknowledged -= size
            self._partner_changed()

    def _partner_changed(self) -> None:
        if self.partner is not None:
            _wake(self.partner._writable)

    def _require_open(self, *, reading: bool) -> None:
        if self._ended:
            raise Unreachable("stream is closed")
        if self._partner_ended:
            raise Unreachable("stream ended early" if reading else "the other side ended the stream")

    async def _linger(self) -> None:
        left = LINGER_BYTES
        async with asyncio.timeout(LINGER_S):
            while left > 0 and not self._partner_ended and not self._ended:
                left -= len(self._unread)
                self._consume(len(self._unread))
                await self._readable.wait()


def _wake(event: asyncio.Event) -> None:
    """Wake the present waiters only: `wait` never returns for a change that was seen already."""
    event.set()
    event.clear()
