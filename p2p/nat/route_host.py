"""A host that reaches peers behind NATs: direct, else through a punched hole, else through a relay.

It wraps any host and is one itself, so that nothing above it knows the difference. A peer is connected while a
direct connection or a held circuit exists; new streams take the direct one as soon as there is one, and relayed
peers are punched again now and then.
"""

import asyncio
import logging
import random
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from atoll.p2p.host.interface import (
    Connection,
    Handler,
    Host,
    HostEvent,
    HostRestarted,
    HostStatistics,
    Path,
    PeerAddress,
    PeerConnected,
    PeerDisconnected,
    Stream,
)
from atoll.p2p.nat.candidate_addresses import CandidateAddresses, circuits_through, publishable, split
from atoll.p2p.nat.circuit import CircuitEnd, open_circuit
from atoll.p2p.nat.circuit_stream import SecureStream
from atoll.p2p.nat.circuit_tls import Credentials
from atoll.p2p.nat.held_circuits import HOLD_PROTOCOL, Holds
from atoll.p2p.nat.hole_punch import STAGGER_S, HoleShut, Puncher
from atoll.p2p.nat.nat_calls import Clocks, NatServer
from atoll.p2p.nat.options import RouteOptions, RouteStatistics
from atoll.p2p.nat.race import first
from atoll.p2p.nat.reachability_survey import Survey
from atoll.p2p.nat.relay import Relay
from atoll.p2p.nat.upgrade_schedule import Upgrades
from atoll.p2p.transports.events import Announcer, Subscription
from atoll.p2p.transports.inbound_stream import OnFault, log_fault
from atoll.protocols.errors import Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId, RunId, short
from atoll.protocols.nat import Reach

__all__ = ["RouteHost", "RouteOptions", "RouteStatistics"]

log = logging.getLogger(__name__)

RELAY_AFTER_S = 1.5
"""Direct dials and punches get this head start; a relay is asked at once when they have failed."""
RELAY_S = 8.0
CIRCUIT_S = 4.0
"""A held relay that brings no stream by then is dead; the next one is asked."""
RENDEZVOUS = 3
HOLDS = 2
"""Relays that a relayed connection is held through, where there are so many."""
UPGRADES_AT_ONCE = 5
"""Each asks a rendezvous a few times a minute, which answers sixty: new peers want some of them."""
SUMMONS_AT_ONCE = 16
"""Peers that we dial at one time because others asked us to."""
_TICK_S = 1.0
Way: TypeAlias = tuple[float, Callable[[], Awaitable[None]]]


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
        self._base, self._run = base, run
        self._options = options or RouteOptions()
        self._clocks = clocks or Clocks()
        self._rng = rng or random.SystemRandom()
        self._handlers: dict[str, Handler] = {}
        self._announcer = Announcer()
        self._group: asyncio.TaskGroup | None = None
        self._direct: set[PeerId] = set()
        self._punched: set[PeerId] = set()
        self._connected: set[PeerId] = set()
        self._dialled: dict[PeerId, str] = {}
        """Peers that we dialled at an outside address: relays and rendezvous for those who want us."""
        self._near: dict[PeerId, tuple[str, ...]] = {}
        """Addresses of peers with a hold in networks that may be ours, now or later."""
        self._upgrades = Upgrades(self._rng)
        self._bettering: set[PeerId] = set()
        self._coming: set[PeerId] = set()
        self._circuits: weakref.WeakSet[SecureStream] = weakref.WeakSet()
        self._credentials = Credentials(identity)
        self.survey = Survey(
            *(base, run, lambda: self._direct, self._clocks),
            relay_only=self._options.relay_only,
            is_outside=self._options.is_outside,
        )
        self._puncher = Puncher(base, run, identity, self.claims, self._rng)
        self._holds = Holds(base, run, self._credentials, self._clocks.now, self._on_hold)
        self._relay = Relay(base, run, self._options.relay, self._clocks.now) if self._options.relay else None
        NatServer(base, run, self, self._options.probe, self._options.is_outside, self._clocks)
        self._end = CircuitEnd(base, run, self._credentials, self._handlers, self._is_welcome, on_fault)
        self._handlers[HOLD_PROTOCOL] = self._holds.answer

    # --- Host ---------------------------------------------------------------------------------------

    @property
    def peer_id(self) -> PeerId:
        """Our PeerID."""
        return self._base.peer_id

    async def serve(self, ready: Callable[[], None]) -> None:
        """Serve the base, and everything that keeps routes good, until cancelled."""
        events = self._base.events()
        up = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._base.serve(up.set))
                await up.wait()
                self._group = group
                group.create_task(self._follow(events))
                group.create_task(self.survey.serve())
                group.create_task(self._upgrade())
                ready()
                try:
                    await asyncio.get_running_loop().create_future()
                finally:
                    self._group = None  # a group that ends takes no task
        finally:
            self._announcer.end()

    async def addresses(self) -> tuple[str, ...]:
        """What others may dial: our own addresses, and circuits through public peers. Raises Unreachable."""
        if self._options.announce:
            return self._options.announce
        through = {} if self.survey.verdict.reach == "public" else self._dialled
        circuits = circuits_through(through, self._known_relays())
        if self._options.relay_only:
            return circuits
        return publishable(await self._base.addresses(), self.survey.reached(), circuits)

    async def connect(self, address: PeerAddress) -> None:
        """Connect by the best way that works. Raises Unreachable with what failed on each way."""
        if address.peer == self.peer_id:
            raise Unreachable("dial to self")
        if address.peer in self._direct:
            return
        places = split(address.maddrs)
        ways = self._better_ways(address.peer, places)
        if address.peer in self._connected and not ways:
            return
        if address.peer not in self._connected and self._helpers(places):
            ways["relayed"] = (RELAY_AFTER_S, lambda: self._relayed(address.peer, places))
        await first(ways)

    async def disconnect(self, peer: PeerId) -> None:
        """Close all connections and circuits to a peer."""
        self._holds.drop(peer)
        self._end_circuits(peer)
        await self._base.disconnect(peer)

    async def connections(self) -> tuple[Connection, ...]:
        """All live connections, relayed ones too."""
        before = set(self._direct)
        live = await self._base.connections()
        direct = {connection.peer for connection in live}
        for peer in direct ^ before:  # what came or went while we asked is told by events
            self._on_direct(peer, here=peer in direct)
        found = [self._named(connection) for connection in live]
        for peer in self._holds.peers():
            if peer not in direct:
                hold = self._holds.of(peer)[0]
                found.append(Connection(peer, f"/p2p/{hold.relay}/p2p-circuit", Path.RELAYED))
        return tuple(found)

    async def open_stream(self, peer: PeerId, protocol: str) -> Stream:
        """Open a stream by the best way that is open now. Raises Unreachable."""
        if peer in self._direct:
            return await self._base.open_stream(peer, protocol)
        reasons = [f"not connected to {short(peer)}"]
        for hold in self._holds.of(peer):
            try:
                async with asyncio.timeout(CIRCUIT_S):
                    stream = await open_circuit(
                        *(self._base, self._run, self._credentials, hold.relay, peer, protocol)
                    )
            except Unreachable as error:
                reasons.append(str(error))
            except TimeoutError:
                reasons.append(f"relay {short(hold.relay)}: no answer in {CIRCUIT_S:.0f} s")
            else:
                self._circuits.add(stream)
                return stream
        raise Unreachable("; ".join(reasons[1:] or reasons))

    async def forget_failures(self) -> None:
        """See the base."""
        await self._base.forget_failures()

    def set_handler(self, protocol: str, handler: Handler) -> None:
        """Serve `protocol`, on direct streams and in circuits."""
        self._handlers[protocol] = handler
        self._base.set_handler(protocol, handler)

    def events(self) -> Subscription:
        """All events from now on."""
        return self._announcer.subscribe()

    def statistics(self) -> HostStatistics:
        """The base's: circuits are streams of the base too."""
        return self._base.statistics()

    # --- asks.Node ----------------------------------------------------------------------------------

    def reach(self) -> Reach:
        """How we may be reached."""
        return self.survey.verdict.reach

    def relays(self) -> bool:
        """Whether we relay for others."""
        return self._relay is not None

    def claims(self) -> tuple[str, ...]:
        """Addresses at which anybody may dial us."""
        if self._options.relay_only:
            return ()
        return self._options.announce or self.survey.reached()

    def dial_soon(self, peer: PeerId, maddrs: tuple[str, ...], *, is_hole: bool) -> None:
        """Our half of a punch that `peer` asked for. Raises Unreachable when we do not want to."""
        if self._options.relay_only:
            raise Unreachable("this node is reached through relays only")
        if not maddrs:
            raise Unreachable("no address that can be punched")
        if self._group is None:
            raise Unreachable("this node is stopping")
        if peer in self._direct or peer in self._coming:
            return
        if len(self._coming) >= SUMMONS_AT_ONCE:
            raise Unreachable("too many punches at once")
        self._coming.add(peer)
        self._group.create_task(self._summoned(peer, maddrs, is_hole=is_hole), name="punch")

    # --- for the status page ------------------------------------------------------------------------

    def routes(self) -> RouteStatistics:
        """A snapshot."""
        verdict, survey = self.survey.verdict, self.survey
        ahead = sorted(survey.clock_ahead_s.values())
        observed = dict.fromkeys(maddr for seen in survey.looks.values() for maddr in seen.maddrs)
        return RouteStatistics(
            *(verdict.reach, verdict.why, tuple(observed)),
            self._relay.statistics() if self._relay else None,
            ahead[len(ahead) // 2] if ahead else None,
        )

    # --- ways ---------------------------------------------------------------------------------------

    def _better_ways(self, peer: PeerId, places: CandidateAddresses) -> dict[str, Way]:
        """Those that need no relay."""
        ways: dict[str, Way] = {}
        if places.direct and self._may_dial(peer):
            ways["direct"] = (0.0, lambda: self._dial(peer, places.direct))
        if self._helpers(places) and not self._options.relay_only:
            ways["punched"] = (0.0, lambda: self._punch(peer, places))
        return ways

    def _may_dial(self, peer: PeerId) -> bool:
        return not self._options.relay_only or peer in self._options.trusted

    async def _dial(self, peer: PeerId, maddrs: Sequence[str]) -> None:
        await self._base.connect(PeerAddress(peer, tuple(maddrs)))
        self._on_direct(peer, here=True)
        for connection in await self._base.connections():
            if (
                connection.peer == peer
                and self._options.is_outside(connection.maddr)
                and peer not in self._punched
            ):
                self._dialled[peer] = connection.maddr

    def _helpers(self, places: CandidateAddresses) -> list[PeerId]:
        """Who may bring us together: those the peer names, then public peers of ours."""
        relays = self._known_relays()
        own = sorted((peer for peer in self._dialled if peer in self._direct), key=lambda p: p not in relays)
        named = [peer for peer in places.through if peer != self.peer_id]
        return list(dict.fromkeys((*named, *own)))[: 2 * RENDEZVOUS]

    def _known_relays(self) -> set[PeerId]:
        return {peer for peer, seen in self.survey.looks.items() if seen.relays}

    async def _punch(self, peer: PeerId, places: CandidateAddresses) -> None:
        try:
            is_punched = await self._puncher.punch(peer, await self._rendezvous(places))
        except HoleShut:
            self.survey.on_punch(peer, worked=False)
            raise
        if is_punched:
            self._punched.add(peer)
            self.survey.on_punch(peer, worked=True)
        self._on_direct(peer, here=True)

    async def _rendezvous(self, places: CandidateAddresses) -> list[PeerId]:
        """Helpers that we are connected to; only if there is none, those that can be dialled."""
        helpers = self._helpers(places)
        here = [helper for helper in helpers if helper in self._direct]
        if not here:
            async with asyncio.TaskGroup() as group:
                dials = {helper: group.create_task(self._is_here(helper, places)) for helper in helpers}
            here = [helper for helper, dial in dials.items() if dial.result()]
        return here[:RENDEZVOUS]

    async def _summoned(self, peer: PeerId, maddrs: tuple[str, ...], *, is_hole: bool) -> None:
        if is_hole:
            self._punched.add(peer)  # now: the other side's packets may get in before ours are answered
        try:
            await self._puncher.dial(peer, maddrs)
        except Unreachable as error:
            log.debug("%s", error)
            if peer not in self._direct:
                self._punched.discard(peer)
            return
        finally:
            self._coming.discard(peer)
        if is_hole:
            self.survey.on_punch(peer, worked=True)
        self._on_direct(peer, here=True)

    async def _relayed(self, peer: PeerId, places: CandidateAddresses) -> None:
        """Hold a circuit through the first relay that gives one."""
        held = {hold.relay for hold in self._holds.of(peer)}
        helpers = [helper for helper in self._helpers(places) if helper not in held]
        await first(
            {
                short(helper): (index * STAGGER_S, partial(self._hold, peer, helper, places))
                for index, helper in enumerate(helpers)
            }
        )

    async def _hold(self, peer: PeerId, relay: PeerId, places: CandidateAddresses) -> None:
        async with asyncio.timeout(RELAY_S):
            if not await self._is_here(relay, places):
                raise Unreachable(f"relay {short(relay)} is out of reach")
            stream = await self._holds.open(peer, relay)
        if self._group is None:
            stream.reset()
            raise Unreachable("this node is stopping")
        self._near[peer] = tuple(m for m in places.direct if not self._options.is_outside(m))
        self._group.create_task(self._keep(stream), name="hold")
        await asyncio.sleep(0)  # let the hold begin

    async def _keep(self, stream: SecureStream) -> None:
        await self._holds.keep(stream)
        # The relay, or the peer, is gone: what else goes that way is dead too.
        for circuit in tuple(self._circuits):
            if (circuit.peer, circuit.relay) == (stream.peer, stream.relay):
                circuit.reset()

    async def _is_here(self, helper: PeerId, places: CandidateAddresses) -> bool:
        """Whether we are connected to a helper, dialling it where the peer says that it is.

        A node that hides dials only those that it trusts: anybody may name himself as the relay of a peer.
        """
        if helper in self._direct:
            return True
        maddrs = places.through.get(helper, ())
        if not maddrs or not self._may_dial(helper):
            return False
        try:
            async with asyncio.timeout(RELAY_S / 2):
                await self._dial(helper, maddrs)
        except (Unreachable, TimeoutError):
            return False
        return True

    # --- reactions ----------------------------------------------------------------------------------

    async def _follow(self, events: AsyncIterator[HostEvent]) -> None:
        async for event in events:
            match event:
                case PeerConnected(peer):
                    self._on_direct(peer, here=True)
                case PeerDisconnected(peer):
                    self._on_direct(peer, here=False)
                case HostRestarted():
                    self.survey.soon()
                    self._announcer.announce(event)

    def _on_direct(self, peer: PeerId, *, here: bool) -> None:
        if here == (peer in self._direct):
            return
        if here:
            self._direct.add(peer)
            if self._holds.of(peer):
                self._upgrades.replaced(peer, self._clocks.now())
        else:
            self._direct.discard(peer)
            self._punched.discard(peer)
            self._dialled.pop(peer, None)
        self.survey.soon()
        self._tell(peer)

    def _on_hold(self, peer: PeerId) -> None:
        if not self._holds.of(peer):
            self._upgrades.forget(peer)
            self._near.pop(peer, None)
        elif peer in self._direct:
            self._upgrades.replaced(peer, self._clocks.now())
        else:
            self._upgrades.held(peer, self._clocks.now())
        self._tell(peer)

    def _is_welcome(self, peer: PeerId, protocol: str) -> bool:
        """Whom a relay may bring: peers that hold a circuit, or want to."""
        return peer != self.peer_id and (peer in self._connected or protocol == HOLD_PROTOCOL)

    def _tell(self, peer: PeerId) -> None:
        """Announce what changed for those who look at us from above."""
        is_here = peer in self._direct or bool(self._holds.of(peer))
        if is_here == (peer in self._connected):
            return
        if is_here:
            self._connected.add(peer)
            self._announcer.announce(PeerConnected(peer))
        else:
            self._connected.discard(peer)
            self._announcer.announce(PeerDisconnected(peer))

    def _named(self, connection: Connection) -> Connection:
        if connection.peer in self._punched:
            return replace(connection, path=Path.PUNCHED)
        return connection

    def _end_circuits(self, peer: PeerId) -> None:
        self._end.end(peer)
        for stream in tuple(self._circuits):
            if stream.peer == peer:
                stream.reset()

    # --- better ways for relayed peers --------------------------------------------------------------

    async def _upgrade(self) -> None:
        """Punch relayed peers again, ever more rarely; end circuits that a direct connection has replaced."""
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(_TICK_S)
                now = self._clocks.now()
                for peer in self._holds.peers():
                    if not self._upgrades.is_due(peer, now):
                        continue
                    if peer in self._direct:
                        self._holds.drop(peer)
                        self._end_circuits(peer)
                    elif self._is_ours(peer) and len(self._bettering) < UPGRADES_AT_ONCE:
                        self._upgrades.postpone(peer, now)
                        if peer not in self._bettering:
                            self._bettering.add(peer)
                            group.create_task(self._better(peer))

    def _is_ours(self, peer: PeerId) -> bool:
        return any(hold.is_ours for hold in self._holds.of(peer))

    async def _better(self, peer: PeerId) -> None:
        """A second relay, so that the end of the first is no end of the connection; then a direct connection."""
        near = self._near.get(peer, ())
        places = CandidateAddresses(near, {hold.relay: () for hold in self._holds.of(peer)})
        try:
            if len(places.through) < HOLDS:
                await self._second_relay(peer, places)
            if ways := self._better_ways(peer, places):
                await first(ways)
                log.info("the relayed connection to %s is direct now", short(peer))
        except Unreachable as error:
            log.debug("still relayed: %s", error)
        finally:
            self._bettering.discard(peer)

    async def _second_relay(self, peer: PeerId, places: CandidateAddresses) -> None:
        try:
            await self._relayed(peer, places)
        except Unreachable as error:
            log.debug("no second relay: %s", error)
