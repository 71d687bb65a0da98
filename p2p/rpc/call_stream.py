"""One stream of the calls wire: the Hello, and the caller's half."""

import asyncio

from atoll.p2p.host.framing import PART_S, read_frame, write_frame
from atoll.p2p.host.interface import Stream
from atoll.p2p.rpc import frames
from atoll.p2p.rpc.outbox import FrameOutbox
from atoll.protocols import codec
from atoll.protocols.codec import MESSAGE_MAX_BYTES
from atoll.protocols.errors import AtollError, DecodeError, PeerFault, RunMismatch, Unreachable
from atoll.protocols.ids import PeerId, short
from atoll.protocols.wires import CALLS, pick

HELLO_S = 10.0
IN_FLIGHT = 64
"""Most requests in flight per peer, in each direction."""
_IDS = 1 << 32


def check_hello(ours: frames.Hello, theirs: frames.Hello, peer: PeerId) -> int:
    """Version of the wire to speak. Raises RunMismatch, VersionMismatch; DecodeError for a wrong peer or wire."""
    if theirs.wire != CALLS.name or theirs.peer != peer:
        raise DecodeError(f"{short(peer)} introduced itself as {short(theirs.peer)} on the wire {theirs.wire}")
    version = pick(CALLS, theirs.newest, theirs.oldest)
    if theirs.run != ours.run:
        raise RunMismatch(
            f"peer {short(peer)} trains run {short(theirs.run)}, we train run {short(ours.run)}",
            hint="check the invite: both sides must join the same run",
        )
    return version


async def read_hello(stream: Stream) -> frames.Hello:
    """Read the other side's first frame. Raises DecodeError, Unreachable."""
    return codec.decode(await read_frame(stream, frames.HELLO_MAX_BYTES), frames.Hello)


async def send_hello(stream: Stream, hello: frames.Hello) -> None:
    """Send our first frame. Raises Unreachable."""
    await write_frame(stream, codec.encode(hello))


class OutgoingCalls:
    """The caller's half of a stream that we opened: requests out, replies in. The task in `run` owns it."""

    def __init__(self, peer: PeerId) -> None:
        self.peer = peer
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.slots = asyncio.Semaphore(IN_FLIGHT)
        self.outbox = FrameOutbox()
        self._pending: dict[int, asyncio.Future[memoryview]] = {}
        """Replies that are waited for, by the ids of their requests."""
        self._next_id = 0
        self._largest_bytes = MESSAGE_MAX_BYTES
        """Largest reply that was asked for: it may come after its caller gave up."""
        self._end: AtollError | None = None

    async def run(self, stream: Stream) -> None:
        """Carry calls until the stream ends. Raises Unreachable or DecodeError."""
        self.opened.set_result(None)
        async with asyncio.TaskGroup() as group:
            writer = group.create_task(self.outbox.drain(stream))
            try:
                await self._read_replies(stream)
            except AtollError as error:
                self._end = error
            finally:
                writer.cancel()

    def finish(self, error: AtollError) -> None:
        """Fail every pending request with `error`."""
        self._end = self._end or error
        if not self.opened.done():
            self.opened.set_result(None)
        for pending in self._pending.values():
            if not pending.done():
                pending.set_exception(fresh_copy(self._end))
                pending.exception()  # seen: perhaps its caller has just been cancelled
        self._pending.clear()
        self.outbox.finish()

    async def request(self, method: str, body: bytes, max_bytes: int) -> memoryview:
        """Body of the reply to a request. Raises Unreachable, DecodeError, and the failure that the peer sent."""
        if not self.opened.done():
            await asyncio.wait((self.opened,))
        async with self.slots:
            await self.outbox.backlog.room()
            if self._end is not None:
                raise fresh_copy(self._end)
            number = self._take_id()
            pending: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()
            self._pending[number] = pending
            self._largest_bytes = max(self._largest_bytes, max_bytes)
            self.outbox.put(frames.request(number, method, body))
            try:
                return await pending
            except asyncio.CancelledError:
                self.outbox.put(frames.cancel(number))
                raise
            finally:
                self._pending.pop(number, None)

    def _take_id(self) -> int:
        while True:
            self._next_id = (self._next_id + 1) % _IDS
            if self._next_id not in self._pending:
                return self._next_id

    async def _read_replies(self, stream: Stream) -> None:
        while True:
            frame = frames.parse(await read_frame(stream, self._frame_max_bytes, PART_S))
            pending = self._pending.pop(frame.id, None)
            if pending is None or pending.done():
                continue  # its caller gave up
            if frame.kind is frames.Kind.REPLY:
                pending.set_result(frame.body)
            elif frame.kind is frames.Kind.FAILURE:
                pending.set_exception(self._remote_error(frame.body))
            else:
                raise DecodeError(f"{short(self.peer)} sent a {frame.kind.name} as a reply")

    def _frame_max_bytes(self) -> int:
        return frames.HEADER_MAX_BYTES + self._largest_bytes

    def _remote_error(self, body: memoryview) -> AtollError:
        """The peer's failure as an error of ours.

        A fault that the peer found in our request becomes a plain PeerFault: DecodeError always means that *their*
        bytes were bad. A fault on their machine becomes Unreachable: retried, never fatal, and no score changes.
        """
        failure = codec.decode(body, frames.Failure)
        text = f"peer {short(self.peer)}: {failure.message}"
        if failure.error == RunMismatch.__name__:
            return RunMismatch(text)
        if failure.error in _PEER_FAULTS:
            return PeerFault(text)
        return Unreachable(text)


_PEER_FAULTS = frozenset({"PeerFault", "DecodeError", "SignatureFault"})


def fresh_copy(error: AtollError) -> AtollError:
    """A copy of `error`, so that each waiter raises an exception with a traceback of its own."""
    copy = type(error)(str(error), hint=error.hint)
    copy.__cause__ = error
    return copy
