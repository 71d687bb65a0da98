"""The answering side of the calls wire: streams that peers opened, their requests, and the limits of each peer."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from atoll.p2p.host.framing import PART_S, read_frame
from atoll.p2p.host.interface import Stream
from atoll.p2p.rpc import frames
from atoll.p2p.rpc.call_stream import HELLO_S, check_hello, read_hello, send_hello
from atoll.p2p.rpc.calling_peer import CallingPeer
from atoll.p2p.rpc.outbox import QUEUED_BYTES, FrameOutbox
from atoll.p2p.rpc.turns import CallTurns
from atoll.p2p.transports.host_base import OnFault
from atoll.protocols import codec
from atoll.protocols.codec import MESSAGE_MAX_BYTES
from atoll.protocols.errors import AtollError, DecodeError, LocalFault, PeerFault, RunMismatch, Unreachable
from atoll.protocols.ids import PeerId

log = logging.getLogger(__name__)

HANDLER_S = 60.0
STREAMS_PER_PEER = 4
"""Most calls streams of one peer; one is in use, others are about to end."""
UNREAD_BYTES = 64 * 1024 * 1024
"""Bytes of replies that all peers together have not taken: what a small machine can spare, and enough for 32 peers
that read nothing of two large replies. Above it a stream ends."""
UNREAD_OF_STRANGERS = UNREAD_BYTES // 4
"""While peers that no final set names hold more than this, one of their streams ends: identities cost nothing.
Below it members that read nothing do not push them out: it has room for eight newcomers' two large replies."""


@dataclass(frozen=True, slots=True)
class Method:
    """A registered method: its request type, handler, size cap, and whether it is a notice."""

    request: Any
    handler: Callable[[PeerId, Any], Awaitable[Any]]
    max_bytes: int
    one_way: bool


class CallServer:
    """Answers the requests and notices of peers with registered methods."""

    def __init__(
        self,
        hello: frames.Hello,
        on_fault: OnFault,
        is_accepted: Callable[[PeerId], bool] = lambda peer: False,
    ) -> None:
        """`is_accepted`: whether final sets name a peer; strangers, all others, come after it."""
        self._hello = hello
        self._on_fault = on_fault
        self._is_accepted = is_accepted
        self._methods: dict[str, Method] = {}
        self._guests: dict[PeerId, CallingPeer] = {}
        self._unread_bytes = 0
        self._turns = CallTurns()
        self._frame_max_bytes = frames.HEADER_MAX_BYTES + MESSAGE_MAX_BYTES
        self._has_ended = False

    def add(self, name: str, method: Method) -> None:
        """Register `method` as `name`. Raises ValueError if the name is taken."""
        if name in self._methods:
            raise ValueError(f"method {name} is registered already")
        self._methods[name] = method
        self._frame_max_bytes = max(self._frame_max_bytes, frames.HEADER_MAX_BYTES + method.max_bytes)

    def end(self) -> None:
        """Run no handler from now on: what they use may be closed before the host ends the streams."""
        self._has_ended = True

    async def serve(self, stream: Stream) -> None:
        """Serve one stream of a peer. Raises Unreachable and DecodeError."""
        guest = self._guests.get(stream.peer) or CallingPeer(stream.peer, self._count_unread)
        self._guests[stream.peer] = guest
        guest.streams += 1
        outbox = FrameOutbox(guest.unread)
        try:
            if guest.streams > STREAMS_PER_PEER:
                raise Unreachable("too many calls streams of one peer")
            if await self._welcome(stream):
                guest.outboxes.append(outbox)
                await self._answer_all(stream, guest, outbox)
        finally:
            outbox.finish()
            guest.outboxes = [one for one in guest.outboxes if one is not outbox]
            guest.streams -= 1
            if not guest.streams:
                del self._guests[stream.peer]

    async def _welcome(self, stream: Stream) -> bool:
        """Exchange Hellos; False for a peer of another run or version, which learns of it from our Hello."""
        try:
            async with asyncio.timeout(HELLO_S):
                theirs = await read_hello(stream)
                await send_hello(stream, self._hello)
            check_hello(self._hello, theirs, stream.peer)
        except TimeoutError as error:
            raise Unreachable("no Hello in time") from error
        except RunMismatch as mismatch:
            log.info("%s", mismatch)
            return False
        return True

    async def _answer_all(self, stream: Stream, guest: CallingPeer, outbox: FrameOutbox) -> None:
        """Answer requests until the stream ends; then cancel the handlers that still run."""
        running = dict[int, asyncio.Task[None]]()
        failure: AtollError | None = None
        async with asyncio.TaskGroup() as group:
            writer = group.create_task(outbox.drain(stream))
            try:
                while True:
                    await guest.room(outbox)
                    frame = frames.parse(await read_frame(stream, lambda: self._frame_max_bytes, PART_S))
                    if frame.kind is frames.Kind.CANCEL:
                        if (task := running.get(frame.id)) is not None:
                            task.cancel()
                        continue
                    if frame.kind is frames.Kind.NOTICE:
                        # Most frames are notices, and a task for each would cost more than what it does.
                        await self._answer(stream.peer, guest, frame, outbox)
                        await asyncio.sleep(0)  # notices that have come already must not keep others waiting
                        continue
                    if frame.id in running:
                        raise DecodeError(f"{frame.method} has the id of an open request")
                    await guest.slots.acquire()
                    task = running[frame.id] = group.create_task(self._answer(stream.peer, guest, frame, outbox))
                    task.add_done_callback(partial(_finish, running, frame, guest))
                    guest.asked.change(len(frame.body))
                    await asyncio.sleep(0)  # its reply may leave no room for the next, and others have their turns
            except AtollError as error:
                failure = error
            finally:
                for task in (writer, *running.values()):
                    task.cancel()
        if failure is not None:
            raise failure

    async def _answer(self, peer: PeerId, guest: CallingPeer, frame: frames.Frame, outbox: FrameOutbox) -> None:
        """Run one handler and queue its reply or failure."""
        method = self._methods.get(frame.method)
        is_large = method is not None and not method.one_way and method.max_bytes > MESSAGE_MAX_BYTES
        try:
            async with asyncio.timeout(HANDLER_S):
                if is_large:
                    await self._answer_in_turn(peer, guest, frame, outbox)
                else:
                    await self._reply(peer, frame, outbox)
        except AtollError as error:
            if isinstance(error, PeerFault):
                self._on_fault(peer, error)
            self._refuse(frame, outbox, type(error).__name__, error.line())
        except TimeoutError:
            self._refuse(frame, outbox, Unreachable.__name__, f"{frame.method} took too long")
        except Exception:
            log.exception("handler of %s failed", frame.method)
            self._refuse(frame, outbox, LocalFault.__name__, f"{frame.method} failed on this machine")

    async def _answer_in_turn(
        self, peer: PeerId, guest: CallingPeer, frame: frames.Frame, outbox: FrameOutbox
    ) -> None:
        """Answer once the peer took what it asked for before, and once it is this peer's turn."""
        async with guest.large:
            await guest.unread.room()
            async with self._turns.turn(guest.share, is_stranger=not self._is_accepted(peer)):
                await self._reply(peer, frame, outbox)

    async def _reply(self, peer: PeerId, frame: frames.Frame, outbox: FrameOutbox) -> None:
        body = await self._run_method(peer, frame)
        if frame.kind is frames.Kind.REQUEST:
            outbox.put(frames.reply(frame.id, body))

    def _count_unread(self, size_bytes: int) -> None:
        """Keep the replies of all peers within their bound."""
        self._unread_bytes += size_bytes
        while size_bytes > 0 and self._unread_bytes > UNREAD_BYTES:
            self._victim().break_off()

    def _victim(self) -> FrameOutbox:
        """The stream that ends: a stranger's, of the peer that holds most MiB, that is idle for longest.

        An honest caller on a slow line takes a part of a reply in 8 s, so it may be the idlest. It has one large
        reply at a time, less than those that hold much to keep others out.
        """
        held = [(guest, one) for guest in self._guests.values() for one in guest.outboxes if one.bytes]
        strangers = [pair for pair in held if not self._is_accepted(pair[0].peer)]
        if sum(one.bytes for _, one in strangers) > UNREAD_OF_STRANGERS:
            held = strangers
        return max(held, key=lambda pair: (pair[0].unread.bytes // QUEUED_BYTES, -pair[1].taken_s))[1]

    async def _run_method(self, peer: PeerId, frame: frames.Frame) -> bytes:
        if self._has_ended:
            raise Unreachable("this node is ending")
        method = self._methods.get(frame.method)
        if method is None or method.one_way != (frame.kind is frames.Kind.NOTICE):
            raise LocalFault(f"no method {frame.method!r} here; one of us is older")
        message = codec.decode(frame.body, method.request, max_bytes=method.max_bytes)
        body = codec.encode(await method.handler(peer, message))
        if len(body) > method.max_bytes:
            raise LocalFault(f"the reply of {frame.method} has {len(body)} bytes, more than {method.max_bytes}")
        return body

    def _refuse(self, frame: frames.Frame, outbox: FrameOutbox, error: str, message: str) -> None:
        if frame.kind is frames.Kind.REQUEST:
            outbox.put(frames.failure(frame.id, error, message))


def _finish(running: dict[int, asyncio.Task[None]], frame: frames.Frame, guest: CallingPeer, _: object) -> None:
    """Clean up after the answer to a request, as a done-callback of its task."""
    del running[frame.id]
    guest.slots.release()
    guest.asked.change(-len(frame.body))
