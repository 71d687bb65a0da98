"""A host that reaches peers behind NATs: direct, else through a punched hole, else through a relay.

It wraps any host and is one itself, so that nothing above it knows the difference. A peer is connected while a
direct connection or a held circuit exists; new streams take the direct one as soon as there is one, and relayed
peers are punched again now and then.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from atoll.p2p.host.interface import (
    DIAL_S,
    Connection,
    Handler,
    Host,
    HostEvent,
    HostRestarted,
    PeerAddress,
    PeerConnected,
    PeerDisconnected,
    Route,
    Stream,
)
from atoll.p2p.nat.candidates import Attempt, circuits_through, publishable, race, split
from atoll.p2p.nat.circuit import CircuitAcceptor, prover
from atoll.p2p.nat.circuit_upgrades import CircuitUpgrades, UpgradeSchedule
from atoll.p2p.nat.held_circuits import HOLD_PROTOCOL, HeldCircuits
from atoll.p2p.nat.hole_punch import HolePuncher
from atoll.p2p.nat.nat_protocol import Clocks, NatServer
from atoll.p2p.nat.reachability import without_dial_ports
from atoll.p2p.nat.reachability_survey import ReachabilitySurvey, usual_ahead_s
from atoll.p2p.nat.relay import Relay, RelayStatistics
from atoll.p2p.nat.route_dialer import DirectPeers, RouteDialer, RouteOptions
from atoll.p2p.transports.host_base import Announcer, OnFault, Subscription, log_fault
from atoll.protocols.errors import Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId, RunId
from atoll.protocols.nat import Reach

__all__ = ["RouteHost", "RouteOptions", "RouteStatistics"]

RELAY_AFTER_S = 1.5
"""Direct dials and punches get this head start; a relay is tried at once when they have failed."""


@dataclass(frozen=True, slots=True)
class RouteStatistics:
    """A snapshot of the routes for the status page."""

    reach: Reach
    why: str
    observed: tuple[str, ...]
    """Our addresses as connected peers see them (`without_dial_ports`)."""
    relay: RelayStatistics | None
    clock_ahead_s: float | None
    """How far the clock in the middle is ahead of ours (`usual_ahead_s`)."""


class RouteHost:
    """See `atoll.p2p.host.interface.Host`."""

    def __init__(
        self,
        base: Host,
        identity: Identity,
        run: RunId,
        options: RouteOptions | None = None,
        *,
        clocks: Clocks | None = None,
        rng: random.Random | None = None,
        on_fault: OnFault = log_fault,
    ) -> None:
        """`base`: the transport; this wrapper owns its `serve`."""
        self._base = base
        self.peer_id = base.peer_id
        self.forget_failures = base.forget_failures
        self.favour = base.favour
        self.statistics = base.statistics  # circuits are streams of the base too
        self._options = options or RouteOptions()
        self._clocks = clocks or Clocks()
        rng = rng or random.SystemRandom()
        credentials = prover(identity)
        self._handlers: dict[str, Handler] = {}
        self._announcer = Announcer()
        self._connected: set[PeerId] = set()
        self._direct = DirectPeers(self._on_direct)
        self._held = HeldCircuits(base, run, credentials, self._on_held)
        self._handlers[HOLD_PROTOCOL] = self._held.answer
        self.survey = ReachabilitySurvey(
            base,
            run,
            lambda: self._direct.peers,
            self._clocks,
            announce=self._options.announce,
            relay_only=self._options.relay_only,
            is_outside=self._options.is_outside,
        )
        self._dialer = RouteDialer(
            base=base,
            options=self._options,
            direct=self._direct,
            held=self._held,
            puncher=HolePuncher(base, run, identity, self.survey.public_addresses, rng),
            survey=self.survey,
        )
        self._schedule = UpgradeSchedule(rng)
        self._upgrades = CircuitUpgrades(
            dialer=self._dialer,
            direct=self._direct,
            held=self._held,
            schedule=self._schedule,
            now=self._clocks.now,
            end_circuits=self._end_circuits,
        )
        self._relay = None
        if self._options.relay:
            self._relay = Relay(base, run, self._options.relay, self._clocks.now, self._options.is_stopped)
        NatServer(base, run, self._dialer, self._options.probe, self._options.is_outside, self._clocks)
        self._acceptor = CircuitAcceptor(base, run, credentials, self._handlers, self._is_welcome, on_fault)

    async def serve(self, ready: Callable[[], None]) -> None:
        """Serve the base, and everything that keeps routes good, until cancelled."""
        events = self._base.events()
        up = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._base.serve(up.set))
                await up.wait()
                self._dialer.group = group
                group.create_task(self._follow(events))
                group.create_task(self.survey.serve())
                group.create_task(self._upgrades.serve())
                ready()
                try:
                    await asyncio.get_running_loop().create_future()
                finally:
                    self._dialer.group = None  # a group that ends accepts no task
        finally:
            self._announcer.end()

    async def addresses(self) -> tuple[str, ...]:
        """Addresses to publish: our own, and circuits through public peers. Raises Unreachable."""
        if self._options.announce:
            return self._options.announce
        # A public node needs no relay, and a circuit address would send peers through one.
        through = {} if self.survey.verdict.reach == "public" else self._direct.dialled
        circuits = circuits_through(through, self._dialer.known_relays())
        if self._options.relay_only:
            return circuits
        return publishable(await self._base.addresses(), self.survey.confirmed(), circuits)

    async def connect(self, address: PeerAddress, within_s: float = DIAL_S) -> None:
        """Connect by the best way that works. Raises Unreachable with what failed on each way."""
        peer = address.peer
        if peer == self.peer_id:
            raise Unreachable("dial to self")
        if peer in self._direct:
            return
        candidates = split(address.maddrs)
        attempts = self._dialer.direct_attempts(peer, candidates, within_s)
        if peer in self._connected and not attempts:
            return
        if peer not in self._connected and self._dialer.helpers(candidates):
            attempts["relayed"] = Attempt(RELAY_AFTER_S, lambda: self._dialer.hold_circuit(peer, candidates))
        await race(attempts)

    async def disconnect(self, peer: PeerId) -> None:
        """Close all connections and circuits to a peer."""
        self._end_circuits(peer)
        await self._base.disconnect(peer)

    async def connections(self) -> tuple[Connection, ...]:
        """All live connections, relayed ones too."""
        before = set(self._direct.peers)
        live = await self._base.connections()
        direct = {connection.peer for connection in live}
        # Only what differs from before the await: what changed meanwhile arrives as events, newer than this list.
        for peer in direct ^ before:
            self._direct.set_connected(peer, peer in direct)
        found = [self._with_path(connection) for connection in live]
        for peer in self._held.peers():
            if peer not in direct:
                relay = self._held.circuits_to(peer)[0].relay
                found.append(Connection(peer, f"/p2p/{relay}/p2p-circuit", Route.RELAYED))
        return tuple(found)

    async def open_stream(self, peer: PeerId, protocol: str) -> Stream:
        """Open a stream by the best way that is open now. Raises Unreachable."""
        if peer in self._direct:
            return await self._base.open_stream(peer, protocol)
        return await self._held.open_stream(peer, protocol)

    def set_handler(self, protocol: str, handler: Handler) -> None:
        """Serve `protocol`, on direct streams and in circuits."""
        self._handlers[protocol] = handler
        self._base.set_handler(protocol, handler)

    def events(self) -> Subscription:
        """All events from now on."""
        return self._announcer.subscribe()

    def routes(self) -> RouteStatistics:
        """Return a snapshot for the status page."""
        verdict = self.survey.verdict
        observed = (maddr for seen in self.survey.observations.values() for maddr in seen.maddrs)
        return RouteStatistics(
            reach=verdict.reach,
            why=verdict.why,
            observed=without_dial_ports(observed),
            relay=self._relay.statistics() if self._relay else None,
            clock_ahead_s=usual_ahead_s(self.survey.clock_ahead_s.values()),
        )

    async def _follow(self, events: AsyncIterator[HostEvent]) -> None:
        async for event in events:
            match event:
                case PeerConnected(peer):
                    self._direct.set_connected(peer, True)
                case PeerDisconnected(peer):
                    self._direct.set_connected(peer, False)
                case HostRestarted():
                    self.survey.refresh()
                    self._announcer.announce(event)

    def _on_direct(self, peer: PeerId) -> None:
        if peer in self._direct and self._held.circuits_to(peer):
            self._schedule.on_replaced(peer, self._clocks.now())
        # Any peer that comes or goes may be an observer: what we believed of our reachability rests on them.
        self.survey.refresh()
        self._publish_change(peer)

    def _on_held(self, peer: PeerId) -> None:
        if not self._held.circuits_to(peer):
            self._schedule.forget(peer)
            self._dialer.forget(peer)
        elif peer in self._direct:
            self._schedule.on_replaced(peer, self._clocks.now())
        else:
            self._schedule.on_held(peer, self._clocks.now())
        self._publish_change(peer)

    def _publish_change(self, peer: PeerId) -> None:
        """Announce a peer that came or left; a change from one path to another is neither."""
        is_connected = peer in self._direct or bool(self._held.circuits_to(peer))
        if is_connected == (peer in self._connected):
            return
        if is_connected:
            self._connected.add(peer)
            self._announcer.announce(PeerConnected(peer))
        else:
            self._connected.discard(peer)
            self._announcer.announce(PeerDisconnected(peer))

    def _is_welcome(self, peer: PeerId, protocol: str) -> bool:
        """Whether a relay may bring this stream: the peer holds a circuit, or begins to."""
        return peer != self.peer_id and (peer in self._connected or protocol == HOLD_PROTOCOL)

    def _with_path(self, connection: Connection) -> Connection:
        if connection.peer in self._direct.punched:
            return replace(connection, path=Route.PUNCHED)
        return connection

    def _end_circuits(self, peer: PeerId) -> None:
        self._held.drop(peer)
        self._acceptor.end(peer)
        self._held.reset_streams(peer)
