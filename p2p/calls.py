"""Typed unary calls and notices, multiplexed on one long-lived stream per direction and peer.

`Calls` knows methods and peers; `calls_link` is our half of a stream that we opened; here is also the half
that answers. Wire: docs/wires/calls.md.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from atoll.p2p import calls_frames as frames
from atoll.p2p.calls_link import IN_FLIGHT, Link, Outbox, check_hello, read_hello, send_hello
from atoll.p2p.framing import read_frame
from atoll.p2p.host import Host, Stream
from atoll.p2p.transports.handling import OnFault, log_fault
from atoll.protocols import codec
from atoll.protocols.codec import MESSAGE_MAX_BYTES
from atoll.protocols.errors import AtollError, LocalFault, PeerFault, RunMismatch, Unreachable
from atoll.protocols.ids import PeerId, RunId, short

log = logging.getLogger(__name__)

Request = TypeVar("Request")
Reply = TypeVar("Reply")

STREAMS_PER_PEER = 4
"""Calls streams that one peer may hold towards us; one is in use, others are dying."""


@dataclass(frozen=True, slots=True)
class CallsStatistics:
    """Totals since the start."""

    calls: int
    answered: int
    notices_sent: int
    notices_dropped: int


@dataclass(frozen=True, slots=True)
class _Method:
    request: Any
    handler: Callable[[PeerId, Any], Awaitable[Any]]
    max_bytes: int
    one_way: bool


class _Guest:
    """A peer that calls us: its streams share one allowance."""

    def __init__(self) -> None:
        self.slots = asyncio.Semaphore(IN_FLIGHT)
        self.streams = 0


class Calls:
    """Calls over `host` among the members of one run."""

    def __init__(
        self,
        host: Host,
        run_id: RunId,
        *,
        agent: str = "atoll",
        on_fault: OnFault = log_fault,
        hello_s: float = 10.0,
        open_s: float = 20.0,
        handler_s: float = 60.0,
    ) -> None:
        """`hello_s`: a peer that says nothing for so long is dropped. `handler_s`: longest answer."""
        self._host = host
        self._hello = frames.hello(run_id, host.peer_id, agent)
        self._on_fault = on_fault
        self._hello_s = hello_s
        self._open_s = open_s
        self._handler_s = handler_s
        self._methods: dict[str, _Method] = {}
        self._links: dict[PeerId, Link] = {}
        self._guests: dict[PeerId, _Guest] = {}
        self._group: asyncio.TaskGroup | None = None
        self._frame_max_bytes = frames.HEADER_MAX_BYTES + MESSAGE_MAX_BYTES
        self._calls = self._answered = self._notices = self._dropped = 0
        host.set_handler(frames.PROTOCOL, self._serve_stream)

    def register(
        self,
        method: str,
        request: type[Request],
        reply: type[Reply],
        handler: Callable[[PeerId, Request], Awaitable[Reply]],
        *,
        max_bytes: int = MESSAGE_MAX_BYTES,
    ) -> None:
        """Answer `method`. `max_bytes` caps the request and the reply.

        A PeerFault that `handler` raises counts against the peer that asked: one that asks a third peer
        catches that peer's faults itself.
        """
        self._add(method, _Method(request, handler, max_bytes, one_way=False))

    def register_notice(
        self,
        method: str,
        message: type[Request],
        handler: Callable[[PeerId, Request], Awaitable[None]],
        *,
        max_bytes: int = MESSAGE_MAX_BYTES,
    ) -> None:
        """Take one-way notices. They start in the order of arrival and may overlap."""
        self._add(method, _Method(message, handler, max_bytes, one_way=True))

    async def serve(self) -> None:
        """Own all streams that we open, until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._group:
                await asyncio.get_running_loop().create_future()
        finally:
            self._group = None

    async def call(
        self, peer: PeerId, method: str, request: Any, reply: type[Reply], *, max_bytes: int = MESSAGE_MAX_BYTES
    ) -> Reply:
        """Ask a connected peer and wait for its reply.

        Raises Unreachable (the network, or a fault on the peer's machine), RunMismatch, PeerFault (the peer
        refused the request), DecodeError (the peer sent bad bytes).
        """
        self._calls += 1
        body = await self._link(peer).request(method, codec.encode(request), max_bytes)
        return codec.decode(body, reply, max_bytes=max_bytes)

    def notify(self, peer: PeerId, method: str, message: Any) -> None:
        """Queue a notice; never waits. Lost when the peer is slow or gone, and counted then."""
        if self._group is None:
            self._dropped += 1
            return
        self._notices += 1
        self._link(peer).outbox.put_notice(frames.notice(method, codec.encode(message)))

    def statistics(self) -> CallsStatistics:
        """A snapshot."""
        dropped = self._dropped + sum(link.outbox.notices.dropped for link in self._links.values())
        return CallsStatistics(self._calls, self._answered, self._notices, dropped)

    def _add(self, name: str, method: _Method) -> None:
        if name in self._methods:
            raise ValueError(f"method {name} is registered already")
        self._methods[name] = method
        self._frame_max_bytes = max(self._frame_max_bytes, frames.HEADER_MAX_BYTES + method.max_bytes)

    # The half that calls.

    def _link(self, peer: PeerId) -> Link:
        link = self._links.get(peer)
        if link is None:
            if self._group is None:
                raise LocalFault("calls are not being served")
            link = self._links[peer] = Link(peer)
            self._group.create_task(self._run_link(link))
        return link

    async def _run_link(self, link: Link) -> None:
        """Open, greet and carry one link; its end is everybody's error."""
        error: AtollError = Unreachable(f"peer {short(link.peer)} closed the stream")
        stream: Stream | None = None
        try:
            async with asyncio.timeout(self._open_s):
                stream = await self._host.open_stream(link.peer, frames.PROTOCOL)
            async with asyncio.timeout(self._hello_s):
                await self._greet(stream)
            await link.run(stream)
        except TimeoutError:
            error = Unreachable(f"peer {short(link.peer)} did not answer the Hello in time")
        except AtollError as caught:
            error = caught
        finally:
            del self._links[link.peer]
            link.finish(error)
            self._dropped += link.outbox.notices.dropped
            if stream is not None:
                stream.reset()

    async def _greet(self, stream: Stream) -> None:
        await send_hello(stream, self._hello)
        check_hello(self._hello, await read_hello(stream), stream.peer)

    # The half that answers.

    async def _serve_stream(self, stream: Stream) -> None:
        guest = self._guests.setdefault(stream.peer, _Guest())
        guest.streams += 1
        try:
            if guest.streams > STREAMS_PER_PEER:
                raise Unreachable("too many calls streams of one peer")
            if await self._welcome(stream):
                await self._answer_all(stream, guest)
        finally:
            guest.streams -= 1
            if not guest.streams:
                del self._guests[stream.peer]

    async def _welcome(self, stream: Stream) -> bool:
        """Exchange Hellos; False for a peer of another run, which learns that from our Hello."""
        try:
            async with asyncio.timeout(self._hello_s):
                theirs = await read_hello(stream)
                await send_hello(stream, self._hello)
            check_hello(self._hello, theirs, stream.peer)
        except TimeoutError as error:
            raise Unreachable("no Hello in time") from error
        except RunMismatch as mismatch:
            log.info("%s", mismatch)
            return False
        return True

    async def _answer_all(self, stream: Stream, guest: _Guest) -> None:
        """Answer requests until the stream ends; then what still runs is cancelled."""
        outbox, running = Outbox(), dict[int, asyncio.Task[None]]()
        failure: AtollError | None = None
        async with asyncio.TaskGroup() as group:
            tasks: set[asyncio.Task[None]] = {group.create_task(outbox.drain(stream))}
            try:
                while True:
                    await outbox.room()
                    frame = frames.parse(await read_frame(stream, lambda: self._frame_max_bytes))
                    if frame.kind is frames.Kind.CANCEL:
                        if (task := running.get(frame.id)) is not None:
                            task.cancel()
                        continue
                    await guest.slots.acquire()
                    task = group.create_task(self._answer(stream.peer, frame, outbox))
                    tasks.add(task)
                    running[frame.id] = task
                    task.add_done_callback(_Done(tasks, running, frame.id, guest.slots))
            except AtollError as error:
                failure = error
            finally:
                for task in tuple(tasks):
                    task.cancel()
        if failure is not None:
            raise failure

    async def _answer(self, peer: PeerId, frame: frames.Frame, outbox: Outbox) -> None:
        """Run one handler; its outcome goes to the outbox."""
        try:
            async with asyncio.timeout(self._handler_s):
                body = await self._run_method(peer, frame)
            if frame.kind is frames.Kind.REQUEST:
                outbox.put(frames.reply(frame.id, body))
            self._answered += 1
        except AtollError as error:
            if isinstance(error, PeerFault):
                self._on_fault(peer, error)
            self._refuse(frame, outbox, type(error).__name__, error.line())
        except TimeoutError:
            self._refuse(frame, outbox, Unreachable.__name__, f"{frame.method} took too long")
        except Exception:
            log.exception("handler of %s failed", frame.method)
            self._refuse(frame, outbox, LocalFault.__name__, f"{frame.method} failed on this machine")

    async def _run_method(self, peer: PeerId, frame: frames.Frame) -> bytes:
        method = self._methods.get(frame.method)
        if method is None or method.one_way != (frame.kind is frames.Kind.NOTICE):
            raise LocalFault(f"no method {frame.method!r} here; one of us is older")
        message = codec.decode(frame.body, method.request, max_bytes=method.max_bytes)
        body = codec.encode(await method.handler(peer, message))
        if len(body) > method.max_bytes:
            raise LocalFault(f"the reply of {frame.method} has {len(body)} bytes, more than {method.max_bytes}")
        return body

    def _refuse(self, frame: frames.Frame, outbox: Outbox, error: str, message: str) -> None:
        if frame.kind is frames.Kind.REQUEST:
            outbox.put(frames.failure(frame.id, error, message))


class _Done:
    """What is left to do when an answer is over."""

    __slots__ = ("number", "running", "slots", "tasks")

    def __init__(
        self,
        tasks: set[asyncio.Task[None]],
        running: dict[int, asyncio.Task[None]],
        number: int,
        slots: asyncio.Semaphore,
    ) -> None:
        self.tasks, self.running, self.number, self.slots = tasks, running, number, slots

    def __call__(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if self.running.get(self.number) is task:
            del self.running[self.number]
        self.slots.release()
