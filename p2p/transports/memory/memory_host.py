"""A host of the simulated network: connections, streams and events, with the rules of the real ones."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from atoll.p2p.host.interface import (
    Connection,
    Handler,
    HostRestarted,
    HostStatistics,
    PeerAddress,
    PeerConnected,
    PeerDisconnected,
    Route,
)
from atoll.p2p.transports.events import Announcer, Subscription
from atoll.p2p.transports.inbound_stream import Admission, OnFault, run_handler
from atoll.p2p.transports.memory.memory_stream import MemoryStream
from atoll.p2p.transports.socket_end import ByteCounter
from atoll.protocols.errors import Unreachable
from atoll.protocols.ids import PeerId, short

RESEND_S = 0.25


class HostNetwork(Protocol):
    """What a host asks of the network around it; `MemoryNetwork` is one."""

    silence_s: float

    def send(self, source: PeerId, target: PeerId, size: int, action: Callable[[], None]) -> None:
        """`action` happens at `target` when `size` bytes have arrived."""

    def find(self, address: PeerAddress) -> "MemoryHost | None":
        """The living host that answers there under that name."""

    def knock(self, source: PeerId, target: PeerId) -> bool:
        """`source` sends a first packet to `target`; whether the routers between them let it in."""

    def living(self, peer: PeerId) -> "MemoryHost | None":
        """The host named `peer`, unless it is dead."""

    def believes(self, peer: PeerId, other: PeerId) -> bool:
        """Whether the living host `peer` thinks that it is connected to `other`."""

    def lost(self, peer: PeerId, other: PeerId) -> None:
        """`peer` hears that its connection to `other` is gone."""

    def maddr_of(self, peer: PeerId) -> str:
        """Where `peer` is, dead or alive."""


class MemoryHost:
    """See `atoll.p2p.host.interface.Host`. Made by `MemoryNetwork.host`."""

    def __init__(self, network: HostNetwork, peer: PeerId, maddr: str, on_fault: OnFault) -> None:
        self.maddr = maddr
        self._network = network
        self._peer = peer
        self._on_fault = on_fault
        self._handlers: dict[str, Handler] = {}
        self._announcer = Announcer()
        self._admission = Admission()
        self._traffic = ByteCounter()
        self._links: dict[PeerId, dict[MemoryStream, None]] = {}
        self._restarts = 0
        self._dead = False
        self._group: asyncio.TaskGroup | None = None

    @property
    def peer_id(self) -> PeerId:
        """Our PeerID."""
        return self._peer

    @property
    def alive(self) -> bool:
        """Served, and not killed."""
        return self._group is not None and not self._dead

    async def serve(self, ready: Callable[[], None]) -> None:
        """Take part in the network until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._group:
                ready()
                await asyncio.get_running_loop().create_future()
        finally:
            self._drop_all()
            self._group = None
            self._announcer.end()

    async def addresses(self) -> tuple[str, ...]:
        """Our address in this network. Raises Unreachable while dead."""
        self._require_alive()
        return (self.maddr,)

    async def connect(self, address: PeerAddress) -> None:
        """Dial a peer. Raises Unreachable."""
        self._require_alive()
        if address.peer in self._links:
            return
        if address.peer == self._peer:
            raise Unreachable("dial to self")

        await self._get_in(address.peer)

        def greet() -> bool:
            target = self._network.find(address)
            if target is not None:
                target.gain(self._peer)
            return target is not None

        try:
            if not await self._ask(address.peer, greet):
                raise Unreachable(f"nobody answers for {short(address.peer)}")
            self._require_alive()
            if not self._network.believes(address.peer, self._peer):
                raise Unreachable(f"{short(address.peer)} is gone again")
        except BaseException:
            if address.peer not in self._links:
                self._tell_loss(address.peer)
            raise
        self.gain(address.peer)

    async def _get_in(self, peer: PeerId) -> None:
        """Send first packets until the other side's router lets one in. Raises Unreachable."""
        try:
            async with asyncio.timeout(self._network.silence_s):
                while not self._network.knock(self._peer, peer) and peer not in self._links:  # noqa: ASYNC110
                    await asyncio.sleep(RESEND_S)  # as retransmissions do: nobody tells us when a hole opens
        except TimeoutError as error:
            raise Unreachable(f"{short(peer)} does not answer") from error

    async def disconnect(self, peer: PeerId) -> None:
        """Close the connection to a peer."""
        self._require_alive()
        if peer in self._links:
            self._tell_loss(peer)
            self.lose(peer)

    async def connections(self) -> tuple[Connection, ...]:
        """All live connections."""
        return tuple(Connection(peer, self._network.maddr_of(peer), Route.DIRECT) for peer in self._links)

    async def open_stream(self, peer: PeerId, protocol: str) -> MemoryStream:
        """Open a stream to a connected peer. Raises Unreachable."""
        self._require_alive()
        if peer not in self._links:
            raise Unreachable(f"not connected to {short(peer)}")
        stream = self._stream(peer, protocol, initiator=True)
        try:
            if not await self._ask(peer, lambda: self._offer(stream)):
                raise Unreachable(f"{short(peer)} does not speak {protocol}")
            if peer not in self._links:
                raise Unreachable(f"lost {short(peer)}")
        except BaseException:
            stream.reset()
            raise
        return stream

    async def forget_failures(self) -> None:
        """Nothing to do: this transport dials whenever it is asked to."""

    def set_handler(self, protocol: str, handler: Handler) -> None:
        """Serve `protocol`."""
        self._handlers[protocol] = handler

    def events(self) -> Subscription:
        """All events from now on."""
        return self._announcer.subscribe()

    def statistics(self) -> HostStatistics:
        """A snapshot."""
        open_streams = sum(map(len, self._links.values()))
        return HostStatistics(self._traffic.up, self._traffic.down, open_streams, self._restarts)

    def holds(self, peer: PeerId) -> bool:
        """Whether a connection to `peer` exists here."""
        return peer in self._links

    def gain(self, peer: PeerId) -> None:
        """A connection to `peer` exists now."""
        if peer not in self._links:
            self._links[peer] = {}
            self._announcer.announce(PeerConnected(peer))

    def lose(self, peer: PeerId) -> None:
        """The connection to `peer` is gone, and its streams."""
        streams = self._links.pop(peer, None)
        if streams is not None:
            for stream in tuple(streams):
                stream.break_off()
            self._announcer.announce(PeerDisconnected(peer))

    def die(self) -> None:
        """See `MemoryNetwork.kill`."""
        self._drop_all()
        self._dead = True

    def come_back(self) -> None:
        """See `MemoryNetwork.revive`."""
        if self._dead:
            self._dead = False
            self._restarts += 1
            self._announcer.announce(HostRestarted(self._restarts))

    def accept(self, theirs: MemoryStream, peer: PeerId) -> bool:
        """`peer` opens a stream to us; whether we serve it."""
        handler = self._handlers.get(theirs.protocol)
        if handler is None or self._group is None or peer not in self._links or not self._admission.enter(peer):
            return False
        ours = self._stream(peer, theirs.protocol, initiator=False)
        ours.partner, theirs.partner = theirs, ours
        self._group.create_task(self._handle(ours, handler))
        return True

    async def _handle(self, stream: MemoryStream, handler: Handler) -> None:
        try:
            await run_handler(stream, handler, self._on_fault)
        finally:
            self._admission.leave(stream.peer)

    def _offer(self, stream: MemoryStream) -> bool:
        target = self._network.living(stream.peer)
        return target is not None and target.accept(stream, self._peer)

    def _stream(self, peer: PeerId, protocol: str, *, initiator: bool) -> MemoryStream:
        streams = self._links[peer]

        def send(size: int, action: Callable[[], None]) -> None:
            self._network.send(self._peer, peer, size, action)

        stream = MemoryStream(
            peer, protocol, send, self._traffic, lambda ended: _forget(streams, ended), initiator=initiator
        )
        streams[stream] = None
        return stream

    async def _ask(self, peer: PeerId, question: Callable[[], bool]) -> bool:
        """`question` is answered at `peer`; the answer comes back. Raises Unreachable on silence."""
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def back(said: bool) -> None:
            if not answer.done():
                answer.set_result(said)

        def there() -> None:
            said = question() if not answer.done() else False
            self._network.send(peer, self._peer, 0, lambda: back(said))

        self._network.send(self._peer, peer, 0, there)
        try:
            async with asyncio.timeout(self._network.silence_s):
                return await answer
        except TimeoutError as error:
            raise Unreachable(f"{short(peer)} does not answer") from error

    def _tell_loss(self, peer: PeerId) -> None:
        """The other side hears of the end after the latency."""
        self._network.send(self._peer, peer, 0, lambda: self._network.lost(peer, self._peer))

    def _drop_all(self) -> None:
        for peer in tuple(self._links):
            self._tell_loss(peer)
            self.lose(peer)

    def _require_alive(self) -> None:
        if not self.alive:
            raise Unreachable("the host is not running")


def _forget(streams: dict[MemoryStream, None], stream: MemoryStream) -> None:
    streams.pop(stream, None)
