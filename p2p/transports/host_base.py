"""What hosts and streams share over every transport: identity, handlers, events, and counted bytes.

It also bounds the number of inbound streams, and runs their handlers so that no error reaches the host. After a
return a stream is closed in good order; after an error it is reset. A PeerFault goes to `on_fault`.
"""

import asyncio
import logging
import weakref
from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

from atoll.p2p.host.interface import Handler, HostEvent, HostStatistics, Stream
from atoll.p2p.system.waiting import backoff_s
from atoll.protocols.errors import PeerFault, Unreachable
from atoll.protocols.ids import PeerId, short
from atoll.protocols.wires import CALLS

log = logging.getLogger(__name__)
OnFault = Callable[[PeerId, PeerFault], None]
STREAMS_PER_PEER = 64
"""Inbound streams of one peer at one time; more are reset."""
STREAMS_IN_ALL = 2048
"""Inbound streams of all peers at one time; more are reset."""
CALLS_APART = 2
"""Streams of calls that each peer has beside all others: the one in use, and one that is about to end."""
CALLS_APART_IN_ALL = 384
"""Of all streams, these are for CALLS_APART: two for each of 192 peers."""
_OTHERS = STREAMS_IN_ALL - CALLS_APART_IN_ALL
FIRST_STREAMS = ((_OTHERS * 3 // 4, 2), (_OTHERS // 2, 8))
"""Once so many others are open, a peer that holds so many gets no more: 192 peers always have two each."""
LINGER_S = 10.0
"""A responder that closes waits this long for the initiator's end."""
LINGER_BYTES = 4 * 1024 * 1024
"""… and discards at most so many bytes."""
BUFFER_BYTES = 256 * 1024
"""Read-ahead and write-behind of one stream."""
STABLE_S = 60.0
"""A transport that lived so long starts again without back-off from earlier deaths."""
_QUEUE_EVENTS = 1024


def log_fault(peer: PeerId, fault: PeerFault) -> None:
    """Log a fault of a peer; for hosts that keep no reputation."""
    log.warning("peer %s: %s", short(peer), fault.line())


async def run_handler(stream: Stream, handler: Handler, on_fault: OnFault) -> None:
    """Run `handler` on `stream` and end the stream. Raises nothing but a cancellation."""
    try:
        await handler(stream)
        await stream.close()
    except Unreachable as error:
        log.debug("stream %s of %s ended: %s", stream.protocol, short(stream.peer), error)
    except PeerFault as fault:
        on_fault(stream.peer, fault)
    except Exception:
        log.exception("handler of %s failed", stream.protocol)
    finally:
        stream.reset()


class Admission:
    """Counts inbound streams per peer, so that no peer uses up all of them, nor its blobs all of its own.

    Without its stream of calls a peer's pings fail, and it hangs up.
    """

    def __init__(self) -> None:
        self._calls: Counter[PeerId] = Counter()
        self._others: Counter[PeerId] = Counter()

    def enter(self, peer: PeerId, protocol: str) -> bool:
        """Whether one more stream of `peer` may be served; if so it must `leave`."""
        is_apart = protocol.startswith(CALLS.family) and self._calls.get(peer, 0) < CALLS_APART
        if is_apart and self._calls.total() < CALLS_APART_IN_ALL:
            self._calls[peer] += 1
            return True
        others = self._others.total()
        most = next((most for taken, most in FIRST_STREAMS if others >= taken), STREAMS_PER_PEER)
        if self._others.get(peer, 0) >= most or others >= _OTHERS:
            return False
        self._others[peer] += 1
        return True

    def leave(self, peer: PeerId, protocol: str) -> None:
        """Release the place of one stream of `peer`."""
        # Which one of a peer's streams of calls is counted apart does not matter.
        is_apart = protocol.startswith(CALLS.family) and self._calls.get(peer, 0) > 0
        counted = self._calls if is_apart else self._others
        counted[peer] -= 1
        if not counted[peer]:
            del counted[peer]


class StreamRegistry:
    """The open streams of one host, in the order of their opening, and the payload bytes over all its streams."""

    def __init__(self) -> None:
        self.open: dict[StreamBase, None] = {}
        self.bytes_up = 0
        self.bytes_down = 0

    def reset_all(self) -> None:
        """Reset every open stream."""
        for stream in tuple(self.open):
            stream.reset()


class StreamBase:
    """A stream that counts as open from its creation to the end of our side."""

    def __init__(self, peer: PeerId, protocol: str, registry: StreamRegistry, *, initiator: bool) -> None:
        self.peer = peer
        self.protocol = protocol
        self._registry = registry
        self._initiator = initiator
        self._ended = False
        registry.open[self] = None

    def reset(self) -> None:
        """Drop the stream now. Idempotent."""
        raise NotImplementedError

    def _finish(self) -> None:
        self._ended = True
        self._registry.open.pop(self, None)


class Reader(Protocol):
    """What reads as `asyncio.StreamReader` does."""

    async def readexactly(self, n: int) -> bytes: ...

    async def read(self, n: int) -> bytes: ...


class ReaderStream(StreamBase):
    """A stream whose inbound bytes come from a reader."""

    _reader: Reader

    async def read_exactly(self, size: int) -> bytes:
        """Read `size` bytes. Raises Unreachable when the stream ends before."""
        try:
            data = await self._reader.readexactly(size)
        except asyncio.IncompleteReadError as error:
            raise Unreachable(f"stream ended {size - len(error.partial)} bytes early") from error
        except OSError as error:
            raise Unreachable(f"stream broke: {error}") from error
        self._registry.bytes_down += size
        return data

    async def _linger(self) -> None:
        """Wait for the initiator's end, discarding a bounded rest. Raises TimeoutError after LINGER_S."""
        # A responder that closes first loses its tail on QUIC: the initiator acknowledges by ending the stream.
        left = LINGER_BYTES
        async with asyncio.timeout(LINGER_S):
            while left > 0 and (data := await self._reader.read(BUFFER_BYTES)):
                left -= len(data)


class Subscription:
    """Iterates over the events since its creation. A reader that is slower than the queue loses the oldest."""

    def __init__(self) -> None:
        self._events: deque[HostEvent] = deque()
        self._wake = asyncio.Event()
        self._ended = False

    def push(self, event: HostEvent) -> None:
        """Queue an event."""
        if len(self._events) >= _QUEUE_EVENTS:
            self._events.popleft()
        self._events.append(event)
        self._wake.set()

    def end(self) -> None:
        """End the iteration after the queued events."""
        self._ended = True
        self._wake.set()

    def __aiter__(self) -> "Subscription":
        return self

    async def __anext__(self) -> HostEvent:
        while not self._events:
            if self._ended:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._events.popleft()


class Announcer:
    """Hands every event to all live subscriptions; it does not keep a subscription alive."""

    def __init__(self) -> None:
        self._subscriptions: weakref.WeakSet[Subscription] = weakref.WeakSet()

    def subscribe(self) -> Subscription:
        """Return a subscription to all events from now on."""
        subscription = Subscription()
        self._subscriptions.add(subscription)
        return subscription

    def announce(self, event: HostEvent) -> None:
        """Queue `event` at every subscription."""
        for subscription in tuple(self._subscriptions):
            subscription.push(event)

    def end(self) -> None:
        """End all subscriptions: the host has stopped."""
        for subscription in tuple(self._subscriptions):
            subscription.end()


class HostBase:
    """Handlers, events and statistics of a host; a transport adds the connections."""

    def __init__(self, peer_id: PeerId, on_fault: OnFault) -> None:
        self.peer_id = peer_id
        self._on_fault = on_fault
        self._handlers: dict[str, Handler] = {}
        self._announcer = Announcer()
        self._admission = Admission()
        self._streams = StreamRegistry()
        self._restarts = 0
        self._group: asyncio.TaskGroup | None = None
        """Owner of inbound streams; None unless the host is served."""

    def set_handler(self, protocol: str, handler: Handler) -> None:
        """Serve `protocol`."""
        self._handlers[protocol] = handler

    def events(self) -> Subscription:
        """All events from now on."""
        return self._announcer.subscribe()

    def statistics(self) -> HostStatistics:
        """Return a snapshot."""
        streams = self._streams
        return HostStatistics(streams.bytes_up, streams.bytes_down, len(streams.open), self._restarts)

    async def forget_failures(self) -> None:
        """Do nothing: a transport without a back-off of its own has nothing to forget."""

    async def favour(self, peer: PeerId) -> None:
        """Do nothing: a transport that refuses what is too much, and closes nothing, needs no order."""

    async def _serve_stream(self, stream: Stream, handler: Handler) -> None:
        """Run the handler of an admitted inbound stream."""
        try:
            await run_handler(stream, handler, self._on_fault)
        finally:
            self._admission.leave(stream.peer, stream.protocol)


def restart_pause_s(deaths: int) -> float:
    """Seconds before a transport starts again after the `deaths`-th death in a row (from 1)."""
    return backoff_s(deaths, first_s=0.2, max_s=10.0)
