"""One libp2p stream that p2pd carries over a Unix socket.

p2pd has no half-close: an end on one side ends both directions, and a reset looks like an end. So the
initiator closes, and the responder's `close` waits for the initiator's end before it closes too.
"""

import contextlib

from atoll.p2p.transports.host_base import BUFFER_BYTES, ReaderStream, StreamRegistry
from atoll.p2p.transports.p2pd.unix_socket import UnixSocket
from atoll.protocols.errors import Unreachable
from atoll.protocols.ids import PeerId


class P2pdStream(ReaderStream):
    """See `atoll.p2p.host.interface.Stream`."""

    _reader: UnixSocket

    def __init__(
        self, peer: PeerId, protocol: str, registry: StreamRegistry, socket: UnixSocket, *, initiator: bool
    ) -> None:
        super().__init__(peer, protocol, registry, initiator=initiator)
        self._reader = socket

    async def write(self, data: bytes | memoryview) -> None:
        """Hand over all of `data`, at most BUFFER_BYTES ahead of p2pd. Raises Unreachable."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), BUFFER_BYTES):
            part = view[start : start + BUFFER_BYTES]
            if self._ended:
                raise Unreachable("stream is closed")
            try:
                await self._reader.write(part)
            except OSError as error:
                raise Unreachable(f"stream broke: {error}") from error
            self._registry.bytes_up += len(part)

    async def close(self) -> None:
        """End the stream. What an initiator wrote last and got no answer to may be lost (docs/peers.md)."""
        try:
            if not self._ended and not self._initiator:
                with contextlib.suppress(OSError):  # a TimeoutError of the initiator is one
                    await self._linger()
        finally:
            self.reset()

    def reset(self) -> None:
        """Drop the stream now."""
        self._finish()
        self._reader.abort()
