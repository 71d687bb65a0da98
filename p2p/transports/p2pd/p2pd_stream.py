"""One libp2p stream that p2pd carries over a Unix socket.

p2pd has no half-close: an end on one side ends both directions, and a reset looks like an end. So the
initiator closes, and the responder's `close` waits for the initiator's end before it closes too.
"""

import contextlib
from collections.abc import Callable

from atoll.p2p.transports.p2pd.control_client import BUFFER_BYTES, Socket
from atoll.p2p.transports.socket_end import ByteCounter, read_counted, read_over
from atoll.protocols.errors import Unreachable
from atoll.protocols.ids import PeerId


class P2pdStream:
    """See `atoll.p2p.host.interface.Stream`."""

    def __init__(
        self,
        peer: PeerId,
        protocol: str,
        socket: Socket,
        traffic: ByteCounter,
        on_end: "Callable[[P2pdStream], None]",
        *,
        initiator: bool,
    ) -> None:
        self._peer = peer
        self._protocol = protocol
        self._reader, self._writer = socket
        self._traffic = traffic
        self._on_end = on_end
        self._initiator = initiator
        self._ended = False
        self._writer.transport.set_write_buffer_limits(high=BUFFER_BYTES)

    @property
    def peer(self) -> PeerId:
        """The authenticated other side."""
        return self._peer

    @property
    def protocol(self) -> str:
        """Protocol id that both sides agreed on."""
        return self._protocol

    async def read_exactly(self, size: int) -> bytes:
        """`size` bytes. Raises Unreachable when the stream ends before."""
        return await read_counted(self._reader, size, self._traffic)

    async def write(self, data: bytes | memoryview) -> None:
        """Hand over all of `data`, at most BUFFER_BYTES ahead of p2pd. Raises Unreachable."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), BUFFER_BYTES):
            part = view[start : start + BUFFER_BYTES]
            if self._ended:
                raise Unreachable("stream is closed")
            try:
                self._writer.write(part)
                await self._writer.drain()
            except OSError as error:
                raise Unreachable(f"stream broke: {error}") from error
            self._traffic.up += len(part)

    async def close(self) -> None:
        """End our side in good order; a stream that is broken already is only dropped."""
        if self._ended:
            return
        try:
            with contextlib.suppress(OSError, TimeoutError):
                await self._writer.drain()
                if not self._initiator:
                    await read_over(self._reader)
                self._finish()
                self._writer.close()
                await self._writer.wait_closed()
        finally:
            self.reset()

    def reset(self) -> None:
        """Drop the stream now."""
        self._finish()
        self._writer.transport.abort()

    def _finish(self) -> None:
        if not self._ended:
            self._ended = True
            self._on_end(self)
