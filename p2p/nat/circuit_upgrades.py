"""Upgrades of relayed connections: a second relay, then a direct connection, and the end of replaced circuits."""

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.p2p.nat.candidates import CandidateAddresses, race
from atoll.p2p.nat.held_circuits import HeldCircuits
from atoll.p2p.nat.route_dialer import DirectPeers, RouteDialer
from atoll.protocols.errors import Unreachable
from atoll.protocols.ids import PeerId, short

log = logging.getLogger(__name__)

FIRST_S = 3.0
MAX_S = 600.0
GRACE_S = 20.0
"""After an upgrade, relayed streams may end by themselves for so long."""
CIRCUITS_PER_PEER = 2
"""Relays through which a relayed peer is held, where there are so many."""
UPGRADES_AT_ONCE = 5
"""Each asks a rendezvous a few times a minute, which answers sixty: new peers want some of them."""
_TICK_S = 1.0


class UpgradeSchedule:
    """When something is due for each peer with a held circuit: ever more rarely, with jitter."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._due: dict[PeerId, tuple[float, float]] = {}
        """Peer -> (when, the pause before it), in seconds."""

    def on_held(self, peer: PeerId, now: float) -> None:
        """Schedule the first try: the first circuit to `peer` is held."""
        # Both ends begin to hold at one moment; with jitter a swarm does not ask its rendezvous in waves.
        self._due[peer] = (now + self._rng.uniform(0.8, 1.2) * FIRST_S, FIRST_S)

    def on_replaced(self, peer: PeerId, now: float) -> None:
        """Schedule the end of the circuits: a direct connection to `peer` exists beside them."""
        self._due[peer] = (now + GRACE_S, FIRST_S)

    def forget(self, peer: PeerId) -> None:
        """Drop a peer to which no circuit is held any more."""
        self._due.pop(peer, None)

    def is_due(self, peer: PeerId, now: float) -> bool:
        """Whether something is to be done for `peer` now."""
        return now >= self._due.get(peer, (now, FIRST_S))[0]

    def postpone(self, peer: PeerId, now: float) -> None:
        """Schedule the try after the one that begins now, three times as late."""
        pause_s = min(MAX_S, 3.0 * self._due.get(peer, (now, FIRST_S))[1])
        self._due[peer] = (now + pause_s * self._rng.uniform(0.8, 1.2), pause_s)


@dataclass(frozen=True, slots=True)
class CircuitUpgrades:
    """Replaces held circuits by direct connections where it can."""

    dialer: RouteDialer
    direct: DirectPeers
    held: HeldCircuits
    schedule: UpgradeSchedule
    now: Callable[[], float]
    end_circuits: Callable[[PeerId], None]
    """Ends all circuits to a peer and the streams in them."""
    _in_progress: set[PeerId] = field(default_factory=set, init=False)

    async def serve(self) -> None:
        """Begin what is due, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(_TICK_S)
                now = self.now()
                for peer in self.held.peers():
                    if not self.schedule.is_due(peer, now):
                        continue
                    if peer in self.direct:
                        # The grace is over: a stream that still uses the relay would cost its bytes for ever.
                        self.end_circuits(peer)
                    elif self._is_ours(peer) and len(self._in_progress) < UPGRADES_AT_ONCE:
                        self.schedule.postpone(peer, now)
                        if peer not in self._in_progress:
                            self._in_progress.add(peer)
                            group.create_task(self._upgrade(peer))

    def _is_ours(self, peer: PeerId) -> bool:
        return any(held.is_ours for held in self.held.circuits_to(peer))

    async def _upgrade(self, peer: PeerId) -> None:
        candidates = self.dialer.known_candidates(peer)
        try:
            # First a second relay, so that the end of the first one does not end the connection.
            if len(candidates.through) < CIRCUITS_PER_PEER:
                await self._hold_second(peer, candidates)
            if attempts := self.dialer.direct_attempts(peer, candidates):
                await race(attempts)
                log.info("the relayed connection to %s is direct now", short(peer))
        except Unreachable as error:
            log.debug("still relayed: %s", error)
        finally:
            self._in_progress.discard(peer)

    async def _hold_second(self, peer: PeerId, candidates: CandidateAddresses) -> None:
        try:
            await self.dialer.hold_circuit(peer, candidates)
        except Unreachable as error:
            log.debug("no second relay: %s", error)
