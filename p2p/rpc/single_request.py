"""Single requests: one request and one answer on a stream of their own, for answers too large for a call.

An empty answer means that the peer does not have what was requested. Wire: docs/wires/reduction.md.
"""

import asyncio
from collections.abc import Awaitable, Callable
from weakref import WeakValueDictionary

from atoll.p2p.host.framing import PART_S, framed, read_frame, write_frame, write_in_parts
from atoll.p2p.host.interface import Host, Stream
from atoll.protocols.errors import Unreachable
from atoll.protocols.ids import PeerId

RequestHandler = Callable[[PeerId, bytes], Awaitable[bytes]]

REQUEST_S = 60.0
"""Deadline, in seconds, for receiving a request and for computing its answer."""
AT_ONCE = 4
"""Most requests of one peer that are answered at a time; others wait in their streams."""


class SingleRequests:
    """Sends and answers requests on one protocol of a host."""

    def __init__(self, host: Host, protocol: str, request_max_bytes: int, answer_s: float | None = None) -> None:
        """`answer_s`: deadline for sending an answer, in seconds; None: that of each of its parts is enough."""
        self._host = host
        self._protocol = protocol
        self._max_bytes = request_max_bytes
        self._answer_s = answer_s
        self._handler: RequestHandler | None = None
        self._turns: WeakValueDictionary[PeerId, asyncio.Semaphore] = WeakValueDictionary()
        """Limits of the peers whose requests are being answered."""

    def set_handler(self, handler: RequestHandler) -> None:
        """Answer requests with `handler` from now on. It raises PeerFault for an illegal request."""
        self._handler = handler
        self._host.set_handler(self._protocol, self._serve)

    async def ask(self, peer: PeerId, request: bytes, max_bytes: int) -> bytes:
        """Send a request and return the answer, empty if the peer has none.

        Raises Unreachable, DecodeError. The caller owns the deadline.
        """
        stream = await self._host.open_stream(peer, self._protocol)
        try:
            await write_frame(stream, request)
            return await read_frame(stream, max_bytes)
        finally:
            stream.reset()

    async def _serve(self, stream: Stream) -> None:
        assert self._handler is not None
        try:
            turn = self._turns.setdefault(stream.peer, asyncio.Semaphore(AT_ONCE))
            async with asyncio.timeout(REQUEST_S):
                request = await read_frame(stream, self._max_bytes)
                await turn.acquire()
            try:
                async with asyncio.timeout(REQUEST_S):
                    body = await self._handler(stream.peer, request)
                async with asyncio.timeout(self._answer_s):
                    await write_in_parts(stream, framed(body), PART_S)
            finally:
                turn.release()
        except TimeoutError as error:
            raise Unreachable("a request was not sent or answered in time") from error
