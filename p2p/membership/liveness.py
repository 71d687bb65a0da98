"""Liveness: pings every connected peer and disconnects those that do not answer.

After a router restart, a new address or a suspended laptop, the transport notices the loss after half a minute or
never. Two unanswered pings take less than ten seconds; then the peer is dialled again. If this machine itself was
too busy to receive answers, nothing is concluded.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

from atoll.p2p.rpc.calls import Calls
from atoll.protocols.errors import LocalFault, PeerFault, Unreachable
from atoll.protocols.ids import PeerId, short

log = logging.getLogger(__name__)

EVERY_S = 2.5
"""Interval between two pings of one peer, in seconds."""
SILENCE_S = 3.0
"""Deadline of a ping's answer, in seconds; after a lost ping the next is sent at once."""
STRIKES = 2
"""Number of lost pings after which a peer is disconnected."""
TICK_S = 0.5
LAG_S = 1.0
"""Lateness of our own timer, in seconds, above which an unanswered ping proves nothing."""
PING_BYTES = 64


@dataclass(eq=False)
class LivenessMonitor:
    """Pings the neighbours, and measures their round-trip times."""

    calls: Calls
    neighbours: Callable[[], Collection[PeerId]]
    now: Callable[[], float]
    on_fault: Callable[[PeerId, PeerFault], None]
    on_silent: Callable[[PeerId], None]
    """Runs after two unanswered pings."""

    def __post_init__(self) -> None:
        self._due: dict[PeerId, float] = {}
        self._busy: set[PeerId] = set()
        self._silent: set[PeerId] = set()
        self.rtt_s: dict[PeerId, float] = {}
        """Round-trip time of each peer's newest answered ping, in seconds."""
        self.calls.register("ping", bytes, bytes, _pong, max_bytes=PING_BYTES)

    async def serve(self) -> None:
        """Ping every neighbour at its own interval, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                neighbours = sorted(self.neighbours())
                self._due = {peer: self._due.get(peer, 0.0) for peer in neighbours}
                self._silent.intersection_update(neighbours)
                for peer in self.rtt_s.keys() - self._due.keys():
                    del self.rtt_s[peer]  # an answer that came after the connection had gone
                for peer in neighbours:
                    if peer not in self._busy and self._due[peer] <= self.now():
                        self._busy.add(peer)
                        group.create_task(self._check(peer))
                await asyncio.sleep(TICK_S)

    def forget(self, peer: PeerId) -> None:
        """Drop the state of a peer whose connection is gone."""
        self.rtt_s.pop(peer, None)
        self._silent.discard(peer)

    async def _check(self, peer: PeerId) -> None:
        try:
            for strike in range(1, STRIKES + 1):
                if await self._answers(peer) or peer not in self.neighbours():
                    self._silent.discard(peer)
                    return
                self._silent.add(peer)
                if strike < STRIKES and self._is_our_own_end():
                    break
        finally:
            self._busy.discard(peer)
            self._due[peer] = self.now() + EVERY_S
        log.info("%s is silent: hanging up", short(peer))
        self.forget(peer)
        self.on_silent(peer)

    def _is_our_own_end(self) -> bool:
        """Whether most neighbours fell silent together: then our own network failed, and waiting does not help."""
        silent = sum(1 for peer in self.neighbours() if peer in self._silent)
        return silent >= max(2, len(self.neighbours()) / 2)

    async def _answers(self, peer: PeerId) -> bool:
        began = self.now()
        try:
            async with asyncio.timeout(SILENCE_S):
                await self.calls.call(peer, "ping", b"", bytes, max_bytes=PING_BYTES)
        except TimeoutError:
            self.rtt_s.pop(peer, None)
            return self.now() - began > SILENCE_S + LAG_S
        except PeerFault as fault:
            self.on_fault(peer, fault)
        except (Unreachable, LocalFault) as error:
            log.debug("ping of %s: %s", short(peer), error)
        else:
            self.rtt_s[peer] = self.now() - began
        return True  # an error is an answer of the transport, which reports losses itself


async def _pong(peer: PeerId, request: bytes) -> bytes:
    return request
