"""Typed unary calls and notices, multiplexed on one long-lived stream per direction and peer.

`Calls` is the caller's side; `call_stream` has one stream of it, `server` the side that answers. Wire:
docs/wires/calls.md.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from atoll.p2p.host.interface import Host, Stream
from atoll.p2p.rpc import frames
from atoll.p2p.rpc.call_stream import HELLO_S, OutgoingCalls, check_hello, read_hello, send_hello
from atoll.p2p.rpc.server import CallServer, Method
from atoll.p2p.transports.host_base import OnFault, log_fault
from atoll.protocols import codec
from atoll.protocols.codec import MESSAGE_MAX_BYTES
from atoll.protocols.errors import AtollError, LocalFault, Unreachable
from atoll.protocols.ids import PeerId, RunId, short

OPEN_S = 20.0
Request = TypeVar("Request")
Reply = TypeVar("Reply")


class Calls:
    """Calls and notices over `host` among the members of one run."""

    def __init__(
        self,
        host: Host,
        run_id: RunId,
        *,
        on_fault: OnFault = log_fault,
        answers: bool = True,
        is_accepted: Callable[[PeerId], bool] = lambda peer: False,
    ) -> None:
        """`answers`: False for a node that only asks, because it is no member yet.

        `is_accepted`: whether final sets name a peer. The others come after it where many ask.
        """
        self._host = host
        self.me = host.peer_id
        """PeerID of this node."""
        self._hello = frames.hello(run_id, host.peer_id, "atoll")
        self._answers = CallServer(self._hello, on_fault, is_accepted)
        self._links: dict[PeerId, OutgoingCalls] = {}
        self._group: asyncio.TaskGroup | None = None
        self.started = asyncio.Event()
        """Set once `serve` runs: from then on calls can be made."""
        self.on_answer: Callable[[float], None] = lambda round_trip_s: None
        """Receives the seconds from each request to its reply, time at the peer included. Failures have none."""
        self.on_end: Callable[[], None] = lambda: None
        """Called when a stream of ours ended by itself: perhaps the connection is lost."""
        if answers:
            host.set_handler(frames.PROTOCOL, self._answers.serve)

    def register(
        self,
        method: str,
        request: type[Request],
        reply: type[Reply],
        handler: Callable[[PeerId, Request], Awaitable[Reply]],
        *,
        max_bytes: int = MESSAGE_MAX_BYTES,
    ) -> None:
        """Answer `method` with `handler`. `max_bytes` caps request and reply.

        Above MESSAGE_MAX_BYTES it is a large call, and has turns with others: `handler` must not wait for peers.
        A PeerFault that `handler` raises counts against the calling peer. A handler that calls a third peer must
        catch that peer's faults itself.
        """
        self._answers.add(method, Method(request, handler, max_bytes, one_way=False))

    def register_notice(
        self,
        method: str,
        message: type[Request],
        handler: Callable[[PeerId, Request], Awaitable[None]],
        *,
        max_bytes: int = MESSAGE_MAX_BYTES,
    ) -> None:
        """Receive one-way notices with `handler`, one after the other: it must not wait for anything."""
        self._answers.add(method, Method(message, handler, max_bytes, one_way=True))

    async def serve(self) -> None:
        """Run the streams that we open, until cancelled. Calls of others are refused afterwards."""
        async with asyncio.TaskGroup() as self._group:
            self.started.set()
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self._group = None  # a group that ends takes no task
                self._answers.end()

    async def call(
        self, peer: PeerId, method: str, request: Any, reply: type[Reply], *, max_bytes: int = MESSAGE_MAX_BYTES
    ) -> Reply:
        """Send a request to a connected peer and wait for its reply.

        Raises Unreachable (the network, or a fault on the peer's machine), RunMismatch, PeerFault (the peer
        refused the request), DecodeError (the peer sent bad bytes).
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        body = await self._link(peer).request(method, codec.encode(request), max_bytes)
        self.on_answer(loop.time() - began)
        return codec.decode(body, reply, max_bytes=max_bytes)

    def notify(self, peer: PeerId, method: str, message: Any) -> None:
        """Queue a notice without waiting. Notices to a slow or lost peer are dropped."""
        if self._group is not None:
            self._link(peer).outbox.put_notice(frames.notice(method, codec.encode(message)))

    def _link(self, peer: PeerId) -> OutgoingCalls:
        link = self._links.get(peer)
        if link is None:
            if self._group is None:
                raise LocalFault("calls are not being served")
            link = self._links[peer] = OutgoingCalls(peer)
            self._group.create_task(self._run_link(link))
        return link

    async def _run_link(self, link: OutgoingCalls) -> None:
        """Open a stream, exchange Hellos and carry calls; its end fails every pending request."""
        error: AtollError = Unreachable(f"peer {short(link.peer)} closed the stream")
        stream: Stream | None = None
        try:
            async with asyncio.timeout(OPEN_S):
                stream = await self._host.open_stream(link.peer, frames.PROTOCOL)
            async with asyncio.timeout(HELLO_S):
                await self._greet(stream)
            await link.run(stream)
        except TimeoutError:
            error = Unreachable(f"peer {short(link.peer)} did not answer the Hello in time")
        except AtollError as caught:
            error = caught
        finally:
            del self._links[link.peer]
            link.finish(error)
            self.on_end()
            if stream is not None:
                stream.reset()

    async def _greet(self, stream: Stream) -> None:
        await send_hello(stream, self._hello)
        check_hello(self._hello, await read_hello(stream), stream.peer)
