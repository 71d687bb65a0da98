"""One libp2p stream that p2pd carries over a Unix socket.

p2pd has no half-close: an end on one side ends both directions, and a reset looks like an end. So the
initiator closes, and the responder's `close` waits for the initiator's end before it closes too.
"""

import asyncio
import contextlib

from atoll.p2p.host.framing import check_open
from atoll.p2p.transports.host_base import BUFFER_BYTES, LINGER_S, ReaderStream, StreamRegistry
from atoll.p2p.transports.p2pd.control_client import Socket
from atoll.protocols.errors import Unreachable
from atoll.protocols.ids import PeerId


class P2pdStream(ReaderStream):
    """See `atoll.p2p.host.interface.Stream`."""

    def __init__(
        self, peer: PeerId, protocol: str, registry: StreamRegistry, socket: Socket, *, initiator: bool
    ) -> None:
        super().__init__(peer, protocol, registry, initiator=initiator)
        self._reader, self._writer = socket
        if not self._writer.is_closing():  # else the first write or read says that it is lost
            self._writer.transport.set_write_buffer_limits(high=BUFFER_BYTES)

    async def write(self, data: bytes | memoryview) -> None:
        """Hand over all of `data`, at most BUFFER_BYTES ahead of p2pd. Raises Unreachable."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), BUFFER_BYTES):
            part = view[start : start + BUFFER_BYTES]
            if self._ended:
                raise Unreachable("stream is closed")
            try:
                check_open(self._writer)
                self._writer.write(part)
                await self._writer.drain()
            except OSError as error:
                raise Unreachable(f"stream broke: {error}") from error
            self._registry.bytes_up += len(part)

    async def close(self) -> None:
        """End our side in good order; a stream that is broken already is only dropped."""
        if self._ended:
            return
        try:
            with contextlib.suppress(OSError):  # a TimeoutError of the initiator is one
                async with asyncio.timeout(LINGER_S):
                    await self._writer.drain()
                if not self._initiator:
                    await self._linger()
                self._finish()
                self._writer.close()
                # A peer that has stopped reading would hold the rest of what was written, and the stream's place.
                async with asyncio.timeout(LINGER_S):
                    await self._writer.wait_closed()
        finally:
            self.reset()

    def reset(self) -> None:
        """Drop the stream now."""
        self._finish()
        self._writer.transport.abort()
