"""A host of the simulated network: connections, streams and events, with the rules of the real ones."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from atoll.p2p.host.interface import (
    DIAL_S,
    Connection,
    HostRestarted,
    PeerAddress,
    PeerConnected,
    PeerDisconnected,
    Route,
)
from atoll.p2p.transports.host_base import HostBase, OnFault
from atoll.p2p.transports.memory.memory_stream import MemoryStream
from atoll.protocols.errors import Unreachable
from atoll.protocols.ids import PeerId, short

RESEND_S = 0.25
FIRST_RESEND_S = 1.0
"""A dial into a cut repeats its first packet after this time, then after twice as long each time, as TCP does."""


class HostNetwork(Protocol):
    """The network around a host; `MemoryNetwork` implements it."""

    silence_s: float

    def send(self, source: PeerId, target: PeerId, size: int, action: Callable[[], None]) -> None:
        """Call `action` at `target` when `size` bytes have arrived."""

    def find(self, address: PeerAddress) -> "MemoryHost | None":
        """Return the living host of that PeerID at one of those addresses."""

    def is_cut(self, source: PeerId, target: PeerId) -> bool:
        """Whether nothing arrives in one or both directions."""

    def knock(self, source: PeerId, target: PeerId) -> bool:
        """Send a first packet; whether the routers between the two let it in."""

    def living(self, peer: PeerId) -> "MemoryHost | None":
        """Return the host of `peer` if it is alive."""

    def maddr_of(self, peer: PeerId) -> str:
        """Address of `peer`, dead or alive."""


class MemoryHost(HostBase):
    """See `atoll.p2p.host.interface.Host`. Made by `MemoryNetwork.host`."""

    def __init__(self, network: HostNetwork, peer: PeerId, maddr: str, on_fault: OnFault) -> None:
        super().__init__(peer, on_fault)
        self.maddr = maddr
        self._network = network
        self._connected: dict[PeerId, None] = {}
        """Connected peers; a dictionary, because a set would not keep an order."""
        self._dead = False

    @property
    def alive(self) -> bool:
        """Whether the host is served and not killed."""
        return self._group is not None and not self._dead

    async def serve(self, ready: Callable[[], None]) -> None:
        """Take part in the network until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._group:
                ready()
                try:
                    await asyncio.get_running_loop().create_future()
                finally:
                    self._group = None  # a group that ends accepts no task
        finally:
            self._drop_all()
            self._announcer.end()

    async def addresses(self) -> tuple[str, ...]:
        """Return our address in this network. Raises Unreachable while dead."""
        self._require_alive()
        return (self.maddr,)

    async def connect(self, address: PeerAddress, within_s: float = DIAL_S) -> None:
        """Dial a peer. Raises Unreachable."""
        self._require_alive()
        if address.peer in self._connected:
            return
        if address.peer == self.peer_id:
            raise Unreachable("dial to self")

        await self._pass_cut(address.peer, within_s)
        await self._pass_router(address.peer)

        def greet() -> bool:
            target = self._network.find(address)
            if target is not None:
                target.connected(self.peer_id)
            return target is not None

        try:
            if not await self._request(address.peer, greet):
                raise Unreachable(f"nobody answers for {short(address.peer)}")
            self._require_alive()
            target = self._network.living(address.peer)
            if target is None or not target.is_connected(self.peer_id):
                raise Unreachable(f"{short(address.peer)} is gone again")
        except BaseException:
            if address.peer not in self._connected:
                self._send_end(address.peer)
            raise
        self.connected(address.peer)

    async def _pass_cut(self, peer: PeerId, within_s: float) -> None:
        """Send first packets until one is not lost: a cut loses them. Raises Unreachable."""
        pause_s = FIRST_RESEND_S
        try:
            async with asyncio.timeout(min(within_s, self._network.silence_s)):
                while self._network.is_cut(self.peer_id, peer):
                    await asyncio.sleep(pause_s)
                    pause_s *= 2
        except TimeoutError as error:
            raise Unreachable(f"{short(peer)} does not answer") from error

    async def _pass_router(self, peer: PeerId) -> None:
        """Send first packets until the other side's router lets one in. Raises Unreachable."""
        try:
            async with asyncio.timeout(self._network.silence_s):
                while not self._network.knock(self.peer_id, peer) and peer not in self._connected:  # noqa: ASYNC110
                    await asyncio.sleep(RESEND_S)  # as retransmissions do: nobody tells us when a hole opens
        except TimeoutError as error:
            raise Unreachable(f"{short(peer)} does not answer") from error

    async def disconnect(self, peer: PeerId) -> None:
        """Close the connection to a peer."""
        self._require_alive()
        if peer in self._connected:
            self._send_end(peer)
            self.disconnected(peer)

    async def connections(self) -> tuple[Connection, ...]:
        """All live connections."""
        return tuple(Connection(peer, self._network.maddr_of(peer), Route.DIRECT) for peer in self._connected)

    async def open_stream(self, peer: PeerId, protocol: str) -> MemoryStream:
        """Open a stream to a connected peer. Raises Unreachable."""
        self._require_alive()
        if peer not in self._connected:
            raise Unreachable(f"not connected to {short(peer)}")
        stream = self._stream(peer, protocol, initiator=True)
        try:
            if not await self._request(peer, lambda: self._offer(stream)):
                raise Unreachable(f"{short(peer)} does not speak {protocol}")
            if peer not in self._connected:
                raise Unreachable(f"lost {short(peer)}")
        except BaseException:
            stream.reset()
            raise
        return stream

    def is_connected(self, peer: PeerId) -> bool:
        """Whether a connection to `peer` exists on this side."""
        return peer in self._connected

    def connected(self, peer: PeerId) -> None:
        """Record that a connection to `peer` exists. Idempotent."""
        if peer not in self._connected:
            self._connected[peer] = None
            self._announcer.announce(PeerConnected(peer))

    def disconnected(self, peer: PeerId) -> None:
        """Record that the connection to `peer` is gone, and its streams. Idempotent."""
        if peer in self._connected:
            del self._connected[peer]
            for stream in tuple(self._streams.open):
                if isinstance(stream, MemoryStream) and stream.peer == peer:
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
        """Accept a stream that `peer` opens to us; whether we serve it."""
        handler = self._handlers.get(theirs.protocol)
        if (
            handler is None
            or self._group is None
            or peer not in self._connected
            or not self._admission.enter(peer, theirs.protocol)
        ):
            return False
        ours = self._stream(peer, theirs.protocol, initiator=False)
        ours.partner, theirs.partner = theirs, ours
        self._group.create_task(self._serve_stream(ours, handler))
        return True

    def _offer(self, stream: MemoryStream) -> bool:
        target = self._network.living(stream.peer)
        return target is not None and target.accept(stream, self.peer_id)

    def _stream(self, peer: PeerId, protocol: str, *, initiator: bool) -> MemoryStream:
        def send(size: int, action: Callable[[], None]) -> None:
            self._network.send(self.peer_id, peer, size, action)

        return MemoryStream(peer, protocol, self._streams, send, initiator=initiator)

    async def _request(self, peer: PeerId, query: Callable[[], bool]) -> bool:
        """Call `query` at `peer` and return its answer. Raises Unreachable on silence."""
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def receive(reply: bool) -> None:
            if not answer.done():
                answer.set_result(reply)

        def at_peer() -> None:
            reply = query() if not answer.done() else False
            self._network.send(peer, self.peer_id, 0, lambda: receive(reply))

        self._network.send(self.peer_id, peer, 0, at_peer)
        try:
            async with asyncio.timeout(self._network.silence_s):
                return await answer
        except TimeoutError as error:
            raise Unreachable(f"{short(peer)} does not answer") from error

    def _send_end(self, peer: PeerId) -> None:
        """Let the other side know of the end, after the latency."""

        def at_peer() -> None:
            if (host := self._network.living(peer)) is not None:
                host.disconnected(self.peer_id)

        self._network.send(self.peer_id, peer, 0, at_peer)

    def _drop_all(self) -> None:
        for peer in tuple(self._connected):
            self._send_end(peer)
            self.disconnected(peer)

    def _require_alive(self) -> None:
        if not self.alive:
            raise Unreachable("the host is not running")
