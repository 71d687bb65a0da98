"""The ways to a peer: a direct dial, a punched hole, a circuit held through a relay; and who helps with them."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from atoll.p2p.host.interface import DIAL_S, Host, PeerAddress
from atoll.p2p.host.maddrs import is_global, is_of_dial
from atoll.p2p.nat import dialback
from atoll.p2p.nat.candidates import Attempt, CandidateAddresses, race
from atoll.p2p.nat.circuit import SecureStream
from atoll.p2p.nat.held_circuits import HeldCircuits
from atoll.p2p.nat.hole_punch import HolePuncher, PunchFailed, staggered
from atoll.p2p.nat.nat_protocol import Probe, request
from atoll.p2p.nat.reachability_survey import ReachabilitySurvey
from atoll.p2p.nat.relay import RelayLimits
from atoll.protocols.errors import Unreachable
from atoll.protocols.ids import PeerId, short
from atoll.protocols.nat import Look, Reach, Seen

log = logging.getLogger(__name__)

RELAY_S = 8.0
"""A relay that holds no circuit by then has failed; half of it is for dialling the relay."""
RENDEZVOUS = 3
"""Helpers that are asked to bring us together with one peer."""
ALIVE_S = 1.0
"""A summoner's old connection answers within this time, or is closed. Its own dial waits longer (DIAL_S)."""
SUMMONS_AT_ONCE = 16
"""Peers that we dial at one time because others asked us to."""


@dataclass(frozen=True, slots=True)
class RouteOptions:
    """Local choices of a node about its routes."""

    announce: tuple[str, ...] = ()
    """Published instead of everything that we find out; for hosts behind a port forward that nobody can probe."""
    relay: RelayLimits | None = None
    """Relay for others inside these limits; None: do not."""
    relay_only: bool = False
    """Dial nobody but `trusted` peers, announce no address, punch no holes. Relays of others count as nobody."""
    is_stopped: Callable[[], bool] = bool
    """Whether this node's limits stop large transfers now; then it relays nothing."""
    trusted: frozenset[PeerId] = frozenset()
    """Seeds: dialled directly even with `relay_only`."""
    is_outside: Callable[[str], bool] = is_global
    """Whether an address could be dialled from anywhere; simulations have their own."""
    probe: Probe = dialback.answers


class DirectPeers:
    """Peers with a direct connection: which of them were punched, and where we dialled them."""

    def __init__(self, on_change: Callable[[PeerId], None]) -> None:
        """`on_change`: a peer got its first direct connection, or lost its last one."""
        self.peers: set[PeerId] = set()
        self.punched: set[PeerId] = set()
        self.dialled: dict[PeerId, str] = {}
        """Outside addresses at which we dialled peers: such peers can be relays and rendezvous for others."""
        self._on_change = on_change

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self.peers

    def set_connected(self, peer: PeerId, is_connected: bool) -> None:
        """Record whether a direct connection to `peer` exists. Idempotent."""
        if is_connected == (peer in self.peers):
            return
        if is_connected:
            self.peers.add(peer)
        else:
            self.peers.discard(peer)
            self.punched.discard(peer)
            self.dialled.pop(peer, None)
        self._on_change(peer)


@dataclass(slots=True)
class RouteDialer:
    """Tries the ways to a peer. Also the NatNode: it knows where we are reached and dials when summoned."""

    base: Host
    options: RouteOptions
    direct: DirectPeers
    held: HeldCircuits
    puncher: HolePuncher
    survey: ReachabilitySurvey
    group: asyncio.TaskGroup | None = field(default=None, init=False)
    """Owner of the tasks that begin here; None unless the host is served."""
    _summoned: set[PeerId] = field(default_factory=set, init=False)
    _local_addresses: dict[PeerId, tuple[str, ...]] = field(default_factory=dict, init=False)

    def reach(self) -> Reach:
        """See NatNode."""
        return self.survey.verdict.reach

    def is_relay(self) -> bool:
        """See NatNode."""
        return self.options.relay is not None

    def public_addresses(self) -> tuple[str, ...]:
        """See NatNode."""
        return self.survey.public_addresses()

    def schedule_dial(self, peer: PeerId, maddrs: tuple[str, ...], *, is_hole: bool) -> None:
        """See NatNode: our half of a punch that `peer` asked for."""
        if self.options.relay_only:
            raise Unreachable("this node is reached through relays only")
        if not (maddrs or self.public_addresses()):
            raise Unreachable("no address that can be punched")
        if self.group is None:
            raise Unreachable("this node is stopping")
        if peer in self._summoned:
            return
        if len(self._summoned) >= SUMMONS_AT_ONCE:
            raise Unreachable("too many punches at once")
        self._summoned.add(peer)
        self.group.create_task(self._dial_summoner(peer, maddrs, is_hole=is_hole), name="punch")

    def direct_attempts(
        self, peer: PeerId, candidates: CandidateAddresses, within_s: float = DIAL_S
    ) -> dict[str, Attempt[None]]:
        """Attempts whose result is a direct connection: a dial, and a hole punch."""
        attempts: dict[str, Attempt[None]] = {}
        if candidates.direct and self._may_dial(peer):
            attempts["direct"] = Attempt(0.0, lambda: self._dial(peer, candidates.direct, within_s))
        # Not after the dial has failed: most peers are behind NATs, and a dial to them takes long to fail.
        if self.helpers(candidates) and not self.options.relay_only:
            attempts["punched"] = Attempt(0.0, lambda: self._punch(peer, candidates))
        return attempts

    def helpers(self, candidates: CandidateAddresses) -> list[PeerId]:
        """Peers that may bring us together: those that the peer names, then public peers of ours, relays first."""
        relays = self.known_relays()
        named = [peer for peer in candidates.through if peer != self.base.peer_id]
        ours = [peer for peer in self.direct.dialled if peer in self.direct]
        ours.sort(key=lambda peer: peer not in relays)
        return list(dict.fromkeys((*named, *ours)))[: 2 * RENDEZVOUS]

    def known_relays(self) -> set[PeerId]:
        """Connected peers that said that they relay."""
        return {peer for peer, seen in self.survey.observations.items() if seen.relays}

    async def hold_circuit(self, peer: PeerId, candidates: CandidateAddresses) -> None:
        """Hold a circuit through the first relay that gives one. Raises Unreachable with each relay's failure."""
        used = {held.relay for held in self.held.circuits_to(peer)}
        relays = [helper for helper in self.helpers(candidates) if helper not in used]
        await race(staggered(relays, lambda relay: self._hold_through(relay, peer, candidates)))

    def known_candidates(self, peer: PeerId) -> CandidateAddresses:
        """Where a relayed peer might be reached directly: its relays, and its addresses in a network of ours."""
        relays: dict[PeerId, tuple[str, ...]] = {held.relay: () for held in self.held.circuits_to(peer)}
        return CandidateAddresses(self._local_addresses.get(peer, ()), relays)

    def forget(self, peer: PeerId) -> None:
        """Drop what was remembered of a peer to which no circuit is held any more."""
        self._local_addresses.pop(peer, None)

    def _may_dial(self, peer: PeerId) -> bool:
        return not self.options.relay_only or peer in self.options.trusted

    async def _dial(self, peer: PeerId, maddrs: Sequence[str], within_s: float) -> None:
        await self.base.connect(PeerAddress(peer, tuple(maddrs)), within_s)
        self.direct.set_connected(peer, True)
        # The address of the live connection, not one that we tried: only that one certainly leads there.
        for connection in await self.base.connections():
            is_outside = connection.peer == peer and self.options.is_outside(connection.maddr)
            # A punched peer answered only because its router had a hole for us; others could not dial it.
            if is_outside and is_of_dial(connection.maddr, maddrs) and peer not in self.direct.punched:
                self.direct.dialled[peer] = connection.maddr

    async def _punch(self, peer: PeerId, candidates: CandidateAddresses) -> None:
        try:
            is_punched = await self.puncher.punch(peer, await self._connected_helpers(candidates))
        except PunchFailed:
            self.survey.on_punch(peer, worked=False)
            raise
        if is_punched:
            # Before the peer counts as connected: its first event must show the right path.
            self.direct.punched.add(peer)
            self.survey.on_punch(peer, worked=True)
        self.direct.set_connected(peer, True)

    async def _connected_helpers(self, candidates: CandidateAddresses) -> list[PeerId]:
        """Helpers that we are connected to; only if there is none, those that can be dialled."""
        helpers = self.helpers(candidates)
        connected = [helper for helper in helpers if helper in self.direct]
        if not connected:
            async with asyncio.TaskGroup() as group:
                dials = {helper: group.create_task(self._reach_helper(helper, candidates)) for helper in helpers}
            connected = [helper for helper, dial in dials.items() if dial.result()]
        return connected[:RENDEZVOUS]

    async def _dial_summoner(self, peer: PeerId, maddrs: tuple[str, ...], *, is_hole: bool) -> None:
        try:
            if peer in self.direct:
                # Its end may be gone, as when its router got another address: a dial would then send no packet.
                if await self._answers(peer):
                    return
                await self.base.disconnect(peer)
                self.direct.set_connected(peer, False)
            if is_hole:
                # Before the dial: the other side's packets may get in before ours are answered.
                self.direct.punched.add(peer)
            await self.puncher.dial(peer, maddrs)
        except Unreachable as error:
            log.debug("%s", error)
            if peer not in self.direct:
                self.direct.punched.discard(peer)
            return
        finally:
            self._summoned.discard(peer)
        if is_hole:
            self.survey.on_punch(peer, worked=True)
        self.direct.set_connected(peer, True)

    async def _answers(self, peer: PeerId) -> bool:
        """Whether a direct connection still leads to `peer`, who summons us as if there were none."""
        try:
            async with asyncio.timeout(ALIVE_S):
                await request(self.base, peer, Look(self.puncher.run), Seen)
        except (Unreachable, TimeoutError):
            return False
        return True

    async def _hold_through(self, relay: PeerId, peer: PeerId, candidates: CandidateAddresses) -> None:
        async with asyncio.timeout(RELAY_S):
            if not await self._reach_helper(relay, candidates):
                raise Unreachable(f"relay {short(relay)} is out of reach")
            stream: SecureStream = await self.held.open(peer, relay)
        if self.group is None:
            stream.reset()
            raise Unreachable("this node is stopping")
        # Kept for later tries: two laptops that meet in one network connect directly there.
        local = tuple(maddr for maddr in candidates.direct if not self.options.is_outside(maddr))
        self._local_addresses[peer] = local
        self.held.hold(stream)
        self.group.create_task(self.held.keep_alive(stream), name="held circuit")

    async def _reach_helper(self, helper: PeerId, candidates: CandidateAddresses) -> bool:
        """Whether we are connected to a helper, after a dial to where the peer says that the helper is."""
        if helper in self.direct:
            return True
        maddrs = candidates.through.get(helper, ())
        # A node that hides dials only peers that it trusts: any peer may name itself as the relay of another.
        if not maddrs or not self._may_dial(helper):
            return False
        try:
            async with asyncio.timeout(RELAY_S / 2):
                await self._dial(helper, maddrs, RELAY_S / 2)
        except (Unreachable, TimeoutError):
            return False
        return True
