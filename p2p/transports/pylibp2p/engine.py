"""All connections of one node over py-libp2p: listening, dialling, limits. Everything here runs in trio.

py-libp2p's own Host and Swarm are not used: they dial peers by themselves, dial at most two addresses of a
peer, refuse a peer for a minute after one failure, prune connections, and put default protocols on the port.
Its Noise, multistream-select and yamux are.
"""

import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import trio
from libp2p.custom_types import TProtocol
from libp2p.protocol_muxer.multiselect import Multiselect
from multiaddr import Multiaddr

from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.transports.pylibp2p.connection import IDENTIFY, Introduction, PeerConnection, Upgrader, introduce
from atoll.p2p.transports.pylibp2p.tcp_connection import listen_on, tcp_maddr
from atoll.p2p.transports.pylibp2p.yamux import Lane
from atoll.protocols.errors import Unreachable
from atoll.protocols.ids import PeerId

log = logging.getLogger(__name__)

_HANDSHAKES: Final = 64
"""Inbound connections whose handshake is not over, from all IP addresses …"""
_HANDSHAKES_PER_HOST: Final = 16
"""… and from one IP address; more are hung up."""
_LINKS_PER_PEER: Final = 4
"""The oldest is ended for a fifth: a peer that restarted may have left dead ones."""
_DIALS: Final = 8
"""Addresses of a peer that are tried."""
_DIAL_LEAD_S: Final = 0.25
"""The next address is tried when the one before has not answered for so long."""
_ACCEPT_AGAIN_S: Final = 0.2


class Carrier(Protocol):
    """The object that moves the bytes of an adopted lane."""

    async def carry(self) -> None:
        """Move bytes until the stream is over."""


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Functions through which the engine reports to its owner; called in trio, must not block."""

    connected: Callable[[PeerId], None]
    disconnected: Callable[[PeerId], None]
    inbound: Callable[[PeerId, str, Lane], Carrier | None]
    """A stream of a peer; None resets it."""
    ending: Callable[[], None]
    """The engine ends; connections are closed next."""


class Engine:
    """The network of one node from its start to its death. `run` owns all its tasks."""

    def __init__(self, upgrader: Upgrader, protocols: Sequence[str], peers_max: int, callbacks: Callbacks) -> None:
        """`peers_max`: connected peers; further inbound ones are closed."""
        self.peer_id = upgrader.peer_id
        self._upgrader = upgrader
        self._peers_max = peers_max
        self._callbacks = callbacks
        self._links: dict[PeerId, list[PeerConnection]] = {}
        self._handshaking: Counter[str] = Counter()
        self._multiselect = Multiselect({TProtocol(name): None for name in (*protocols, IDENTIFY)})
        self.nursery: trio.Nursery | None = None
        self.maddrs: tuple[str, ...] = ()

    async def run(self, listen: Sequence[str], ready: Callable[[tuple[str, ...]], None]) -> None:
        """Listen and serve for ever; `ready` gets the addresses with their ports. Raises OSError."""
        listeners: list[trio.SocketListener] = []
        try:
            for maddr in listen:
                listeners.append(await listen_on(maddr))  # noqa: PERF401 -- the list must hold those before a failure
            async with trio.open_nursery() as self.nursery:
                for listener in listeners:
                    self.nursery.start_soon(self._accept, listener)
                self.maddrs = tuple(tcp_maddr(*each.socket.getsockname()[:2]) for each in listeners)
                ready(self.maddrs)
                try:
                    await trio.sleep_forever()
                finally:
                    self.nursery = None  # nothing begins any more
                    self._callbacks.ending()
                    await self._close_all()
        finally:
            self.nursery = None
            for listener in listeners:
                listener.socket.close()

    def add_protocol(self, protocol: str) -> None:
        """Let peers open streams of `protocol` from now on."""
        self._multiselect.add_handler(TProtocol(protocol), None)

    def links(self, peer: PeerId | None = None) -> tuple[PeerConnection, ...]:
        """Return the live connections, to one peer or to all."""
        if peer is not None:
            return tuple(self._links.get(peer, ()))
        return tuple(link for links in self._links.values() for link in links)

    async def dial(self, address: PeerAddress, within_s: float) -> None:
        """Connect to a peer unless we are. Raises Unreachable with a reason per address."""
        if address.peer == self.peer_id:
            raise Unreachable("that is our own PeerID")
        if address.peer in self._links:
            return
        addresses, reasons = _dialable(address.maddrs)
        with trio.move_on_after(within_s):
            link = await self._race(address.peer, addresses, reasons)
            if link is not None:
                return self._adopt(link)
        raise Unreachable("; ".join(reasons) or ("no answer" if addresses else "no address"))

    async def close(self, peer: PeerId) -> None:
        """End all connections to a peer."""
        async with trio.open_nursery() as nursery:
            for link in self.links(peer):
                self._forget(link)
                nursery.start_soon(link.close)

    async def _race(
        self, peer: PeerId, addresses: "Sequence[_TcpAddress]", reasons: list[str]
    ) -> PeerConnection | None:
        """Connect to the first address that answers as `peer`; each gets a lead over the next."""
        winners: list[PeerConnection] = []
        kept: PeerConnection | None = None
        try:
            async with trio.open_nursery() as nursery:

                async def attempt(target: _TcpAddress, failed: trio.Event) -> None:
                    try:
                        winners.append(await self._dial_one(target, peer))
                        nursery.cancel_scope.cancel()
                    except Unreachable as error:
                        reasons.append(f"{target.maddr}: {error}")
                        failed.set()

                for target in addresses:
                    failed = trio.Event()
                    nursery.start_soon(attempt, target, failed)
                    with trio.move_on_after(_DIAL_LEAD_S):
                        await failed.wait()
            kept = winners[0] if winners else None
        finally:
            for late in winners:
                if late is not kept:
                    late.cut()
        return kept

    async def _dial_one(self, target: "_TcpAddress", peer: PeerId) -> PeerConnection:
        try:
            stream = await trio.open_tcp_stream(target.host, target.port)
        except OSError as error:
            raise Unreachable(f"cannot connect: {_reason(error)}") from error
        return await self._upgrader.link(stream, peer)

    async def _accept(self, listener: trio.SocketListener) -> None:
        assert self.nursery is not None
        while True:
            try:
                stream = await listener.accept()
                host = str(stream.socket.getpeername()[0])
            except OSError as error:  # out of descriptors, or the peer left while it waited
                log.debug("a connection could not be accepted: %s", error)
                await trio.sleep(_ACCEPT_AGAIN_S)
                continue
            if self._handshaking.total() >= _HANDSHAKES or self._handshaking[host] >= _HANDSHAKES_PER_HOST:
                stream.socket.close()
                continue
            self._handshaking[host] += 1
            self.nursery.start_soon(self._upgrade, stream, host)

    async def _upgrade(self, stream: trio.SocketStream, host: str) -> None:
        try:
            link = await self._upgrader.link(stream, None)
        except Unreachable as error:
            log.debug("a connection from %s came to nothing: %s", host, error)
            return
        finally:
            self._handshaking[host] -= 1
            if not self._handshaking[host]:
                del self._handshaking[host]
        if link.peer == self.peer_id or (link.peer not in self._links and len(self._links) >= self._peers_max):
            link.cut()
        else:
            self._adopt(link)

    def _adopt(self, link: PeerConnection) -> None:
        """Count the connection as live; it is served until it ends."""
        if self.nursery is None:
            return link.cut()
        mine = self._links.setdefault(link.peer, [])
        if len(mine) >= _LINKS_PER_PEER:
            mine[0].cut()
        mine.append(link)
        self.nursery.start_soon(self._serve, link)
        if len(mine) == 1:
            self._callbacks.connected(link.peer)

    async def _serve(self, link: PeerConnection) -> None:
        try:
            await link.run(self._multiselect, self._on_stream)
        finally:
            self._forget(link)

    def _forget(self, link: PeerConnection) -> None:
        mine = self._links.get(link.peer, [])
        if link in mine:
            mine.remove(link)
            if not mine:
                del self._links[link.peer]
                self._callbacks.disconnected(link.peer)

    async def _on_stream(self, link: PeerConnection, protocol: str, lane: Lane) -> None:
        if protocol == IDENTIFY:
            names = [str(name) for name in self._multiselect.get_protocols()]
            about = Introduction(self._upgrader.public_key, self.maddrs, link.maddr, names)
            return await introduce(lane, about)
        carrier = self._callbacks.inbound(link.peer, protocol, lane)
        if carrier is None:
            await lane.drop()
        else:
            await carrier.carry()

    async def _close_all(self) -> None:
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                for link in self.links():
                    self._forget(link)
                    nursery.start_soon(link.close)


@dataclass(frozen=True, slots=True)
class _TcpAddress:
    maddr: str
    host: str
    port: int


def _dialable(maddrs: Sequence[str]) -> tuple[list[_TcpAddress], list[str]]:
    """Return the addresses that we can dial, at most _DIALS at random, and why the others are left out."""
    addresses, reasons = [], []
    for maddr in maddrs:
        try:
            parts = str(Multiaddr(maddr)).split("/")
        except Exception as error:  # multiaddr raises a dozen kinds
            reasons.append(f"{maddr[:100]!r}: not a multiaddr: {error}")
            continue
        if len(parts) == 5 and parts[1] in ("ip4", "ip6", "dns", "dns4", "dns6") and parts[3] == "tcp":
            addresses.append(_TcpAddress(maddr, parts[2], int(parts[4])))
        else:
            reasons.append(f"{maddr}: py-libp2p dials plain TCP only")
    if len(addresses) > _DIALS:
        addresses = random.sample(addresses, _DIALS)
    return addresses, reasons


def _reason(error: OSError) -> str:
    """Return the first reason: trio puts those of several attempts into a group behind the error."""
    cause = error.__cause__
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    return str(cause or error)
