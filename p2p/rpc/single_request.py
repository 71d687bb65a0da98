"""One question on a stream, one answer on it: what is too large for calls and too particular for blobs.

An empty answer says that it is not here. See docs/wires/reduction.md.
"""

import asyncio
from collections.abc import Awaitable, Callable
from weakref import WeakValueDictionary

from atoll.p2p.host.framing import read_frame, write_frame
from atoll.p2p.host.interface import Host, Stream
from atoll.protocols.errors import Unreachable
from atoll.protocols.ids import PeerId

RequestHandler = Callable[[PeerId, bytes], Awaitable[bytes]]

REQUEST_S = 60.0
"""Longest answer, and longest wait for a question."""
AT_ONCE = 4
"""Questions of one peer that are answered at a time; the others wait in their streams."""


class SingleRequests:
    """Asks and answers on one protocol of a host."""

    def __init__(self, host: Host, protocol: str, question_max_bytes: int) -> None:
        self._host, self._protocol, self._max_bytes = host, protocol, question_max_bytes
        self._answer: RequestHandler | None = None
        self._turns: WeakValueDictionary[PeerId, asyncio.Semaphore] = WeakValueDictionary()
        """Of those who are being answered."""

    def set_handler(self, answer: RequestHandler) -> None:
        """Answer from now on. `answer` raises PeerFault for a question that no honest peer asks."""
        self._answer = answer
        self._host.set_handler(self._protocol, self._serve)

    async def ask(self, peer: PeerId, question: bytes, max_bytes: int) -> bytes:
        """The answer; empty where the peer lacks it. Raises Unreachable, DecodeError; owns no deadline."""
        stream = await self._host.open_stream(peer, self._protocol)
        try:
            await write_frame(stream, question)
            return await read_frame(stream, max_bytes)
        finally:
            stream.reset()

    async def _serve(self, stream: Stream) -> None:
        assert self._answer is not None
        try:
            async with asyncio.timeout(REQUEST_S):
                question = await read_frame(stream, self._max_bytes)
            turn = self._turns.setdefault(stream.peer, asyncio.Semaphore(AT_ONCE))
            async with turn:
                async with asyncio.timeout(REQUEST_S):
                    body = await self._answer(stream.peer, question)
                await write_frame(stream, body)
        except TimeoutError as error:
            raise Unreachable("a question was not asked or answered in time") from error
