"""The peers that a node is connected to: host events, liveness, bans, and the table of peers for the status.

Only this module changes the set of connected peers. Host events may be lost while a transport restarts, so the set
is compared with the host's own list every two seconds, and when a stream ends.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from atoll.p2p.discovery.discovery import Discovery
from atoll.p2p.host.interface import (
    Connection,
    Host,
    HostEvent,
    PeerConnected,
    PeerDisconnected,
    Route,
)
from atoll.p2p.membership.liveness import LivenessMonitor
from atoll.p2p.membership.reputation import ReputationTable
from atoll.p2p.rpc.calls import Calls
from atoll.p2p.system.waiting import Notifier
from atoll.protocols.errors import PeerFault, Unreachable
from atoll.protocols.ids import PeerId, short

log = logging.getLogger(__name__)

POLL_S = 2.0
"""Interval between two comparisons of the connected peers with the host's list; status readers wait for it."""
FAVOUR_S = 20.0
"""Interval at which members are favoured: p2pd closes no connection in its first 30 s."""
LOOK_S = 0.05
"""Pause before the comparison that follows the end of a stream, which may come before that of its connection."""
CONNECT_S = 15.0
"""Longest deadline of one dial that a fetch or a request asked for."""


@dataclass(frozen=True, slots=True)
class PeerView:
    """One known peer, as `atoll peer list` shows it."""

    peer: PeerId
    connected: bool
    path: str
    """`direct`, `punched` or `relayed`; empty while the peer is not connected."""
    maddr: str
    """Multiaddr of the live connection, else the best known address; empty when none is known."""
    sources: tuple[str, ...]
    """Where its addresses come from: seed, dns, cache, exchange, dht, dialled."""
    seen_s_ago: float | None
    """Seconds since it was last connected; None: never."""
    rtt_s: float | None
    """Round-trip time of the newest answered ping; None: not measured."""
    blob_bytes_up: int
    blob_bytes_down: int
    faults: int
    """Number of protocol violations that this node has seen."""
    last_error: str


@dataclass(kw_only=True, eq=False)
class PeerConnections:
    """Connected peers of one swarm member."""

    host: Host
    discovery: Discovery
    reputations: ReputationTable
    calls: Calls
    now: Callable[[], float]
    on_fault: Callable[[PeerId, PeerFault], None]
    on_connected: Callable[[PeerId], None]
    on_lost: Callable[[PeerId], None]
    is_member: Callable[[PeerId], bool]
    """Whether final sets name a peer: its connection stays where a crowd takes all places."""
    shares_connections: Callable[[], bool]
    """Whether connections to peers of other runs are left open, because the DHT uses them."""

    def __post_init__(self) -> None:
        self._live: dict[PeerId, Connection | None] = {}
        """Connected peers; None until the first poll has seen the connection's path."""
        self._excluded: set[PeerId] = set()
        self._group: asyncio.TaskGroup | None = None
        self._ended = Notifier()
        """A stream of ours ended. Of a killed peer the kernel ends all at once; a transport may say so later."""
        self.calls.on_end = self._ended.notify
        self._liveness = LivenessMonitor(self.calls, self.neighbours, self.now, self.on_fault, self._on_silent)

    @property
    def is_alone(self) -> bool:
        """Whether no peer is connected."""
        return not self._live

    def exclude(self, peer: PeerId) -> None:
        """Never dial `peer` again, nor use its connection; it may ask why as long as it is connected."""
        self._excluded.add(peer)
        self.discovery.book.exclude(peer)

    def exclude_nobody(self) -> None:
        """Undo every `exclude`."""
        self._excluded.clear()
        self.discovery.book.exclude_nobody()

    def neighbours(self) -> list[PeerId]:
        """Connected peers that are neither banned nor excluded from the run."""
        return [p for p in self._live if p not in self._excluded and not self.reputations.is_banned(p)]

    def direct_neighbours(self) -> list[PeerId]:
        """Neighbours whose connection is known not to go through a relay."""
        routes = ((peer, self._live[peer]) for peer in self.neighbours())
        return [peer for peer, found in routes if found is not None and found.path is not Route.RELAYED]

    async def serve(self, events: AsyncIterator[HostEvent]) -> None:
        """Follow the host's events and poll its connections until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                group.create_task(self._follow(events))
                group.create_task(self._liveness.serve())
                group.create_task(self._favour_members())
                await self._poll()
            finally:
                self._group = None  # a group that ends takes no task

    async def routes(self) -> dict[PeerId, Route]:
        """How each connected peer is reached now. Raises Unreachable."""
        return {connection.peer: connection.path for connection in await self.host.connections()}

    def is_connected(self, peer: PeerId) -> bool:
        """Whether a connection to `peer` is known."""
        return peer in self._live

    def maddr_of(self, peer: PeerId) -> str:
        """Multiaddr of the connection to `peer`; empty while it is not known."""
        connection = self._live.get(peer)
        return connection.maddr if connection else ""

    async def dial(self, peer: PeerId) -> None:
        """Dial a known peer for CONNECT_S at most. A failed dial raises nothing: the next request to it fails."""
        known = self.discovery.book.get(peer)
        if known is None or not known.maddrs:
            return
        try:
            deadline_s = min(CONNECT_S, self.discovery.deadline_s(known))
            async with asyncio.timeout(deadline_s):
                await self.host.connect(known.address, deadline_s)
        except (Unreachable, TimeoutError) as error:
            log.debug("%s: %s", short(peer), error)

    def views(self, blob_bytes: Callable[[PeerId], tuple[int, int]]) -> list[PeerView]:
        """All known peers, connected ones first. `blob_bytes`: chunk bytes sent to and received from a peer."""
        reachable = (known.peer for known in self.discovery.book.all() if known.maddrs)
        return [self._view(peer, *blob_bytes(peer)) for peer in dict.fromkeys((*self._live, *reachable))]

    def _view(self, peer: PeerId, bytes_up: int, bytes_down: int) -> PeerView:
        known, connection = self.discovery.book.get(peer), self._live.get(peer)
        reputation = self.reputations.get(peer)
        best = known.address.maddrs[:1] if known else ()
        seen = known.last_seen if known else None
        is_connected = peer in self._live
        return PeerView(
            peer=peer,
            connected=is_connected,
            path=str(connection.path) if connection else "",
            maddr=connection.maddr if connection else "".join(best),
            sources=tuple(sorted(set(known.maddrs.values()))) if known else (),
            seen_s_ago=0.0 if is_connected else None if seen is None else self.now() - seen,
            rtt_s=self._liveness.rtt_s.get(peer),
            blob_bytes_up=bytes_up,
            blob_bytes_down=bytes_down,
            faults=reputation.faults,
            last_error=reputation.last or (known.last_error if known else ""),
        )

    async def _follow(self, events: AsyncIterator[HostEvent]) -> None:
        async for event in events:
            match event:
                case PeerConnected(peer) if self.reputations.is_banned(peer):
                    await self._disconnect_banned(peer)
                case PeerConnected(peer):
                    self._add(peer)
                case PeerDisconnected(peer):
                    self._remove(peer)

    async def _favour_members(self) -> None:
        while True:
            # Also where only members are listed: p2pd has connections of peers that it does not list.
            for peer in [peer for peer in self._live if self.is_member(peer)]:
                await self.host.favour(peer)
            await asyncio.sleep(FAVOUR_S)

    async def _poll(self) -> None:
        while True:
            live = {connection.peer: connection for connection in await self.host.connections()}
            for peer in [peer for peer in self._live if peer not in live]:
                self._remove(peer)
            for peer, connection in live.items():
                if self.reputations.is_banned(peer):
                    await self._disconnect_banned(peer)
                else:
                    self._add(peer)
                    self._live[peer] = connection
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._ended.wait()
                await asyncio.sleep(LOOK_S)

    def _add(self, peer: PeerId) -> None:
        if peer not in self._live:
            self._live[peer] = None
            self.discovery.on_connected(peer)
            self.on_connected(peer)

    def _remove(self, peer: PeerId) -> None:
        if peer in self._live:
            del self._live[peer]
            self._liveness.forget(peer)
            self.discovery.on_disconnected(peer)
            self.on_lost(peer)

    async def _disconnect_banned(self, peer: PeerId) -> None:
        reputation = self.reputations.get(peer)
        stays = reputation.is_stranger and self.shares_connections()
        if stays and peer not in self._live:
            return
        self._remove(peer)
        if not stays:
            await self._disconnect(peer)
        self.discovery.book.ban(peer, reputation.last, reputation.banned_until)

    def _on_silent(self, peer: PeerId) -> None:
        if self._group is not None:
            self._group.create_task(self._hang_up(peer))

    async def _hang_up(self, peer: PeerId) -> None:
        await self._disconnect(peer)
        self._remove(peer)

    async def _disconnect(self, peer: PeerId) -> None:
        try:
            await self.host.disconnect(peer)
        except Unreachable as error:
            log.debug("%s: %s", short(peer), error)
