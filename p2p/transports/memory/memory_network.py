"""A seeded simulated network whose hosts obey the same interface as the real ones.

Latency, bandwidth and loss per link; partitions; hosts that die and come back. On `run_virtual` it is
deterministic and takes no real time; it also runs on a normal event loop.

Loss is modelled as on a reliable transport: a lost part arrives later by one retransmission time, and what
follows on the same link waits for it. A partition holds back what connections send; they break when it lasts
longer than `silence_s`. A dial into it hangs, and gets through at one of its ever rarer retransmissions.
"""

import asyncio
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.transports.host_base import OnFault, log_fault
from atoll.p2p.transports.memory.memory_host import MemoryHost
from atoll.protocols.errors import LocalFault
from atoll.protocols.ids import PeerId, short

__all__ = ["MemoryHost", "MemoryNetwork", "Quality"]

Router = Literal["port-keeping", "symmetric"]
HOLE_S = 30.0
"""A router forgets a hole through which nothing passed for so long."""


@dataclass(frozen=True, slots=True)
class Quality:
    """One direction of a link."""

    latency_s: float = 0.0
    bandwidth_bps: float = math.inf
    """Bits per second."""
    loss: float = 0.0
    """Share of the parts that must be sent again."""


class _Direction:
    """One direction between two hosts: parts leave one after the other and arrive in order."""

    def __init__(self, quality: Quality) -> None:
        self.quality = quality
        self.is_cut = False
        self._free_at_s = 0.0
        self._last_arrival_s = 0.0
        self._queue: deque[Callable[[], None]] = deque()
        self._withheld = 0

    def send(self, size: int, action: Callable[[], None], rng: random.Random) -> None:
        """Call `action` when `size` bytes have arrived."""
        loop = asyncio.get_running_loop()
        quality = self.quality
        self._free_at_s = max(self._free_at_s, loop.time()) + size * 8 / quality.bandwidth_bps
        arrival_s = self._free_at_s + quality.latency_s
        while quality.loss and rng.random() < quality.loss:
            arrival_s += max(0.2, 3 * quality.latency_s)
        self._last_arrival_s = max(self._last_arrival_s, arrival_s)
        self._queue.append(action)
        loop.call_at(self._last_arrival_s, self._arrive)

    def heal(self) -> None:
        """Deliver what the cut withheld."""
        self.is_cut = False
        for _ in range(self._withheld):
            self._queue.popleft()()
        self._withheld = 0

    def discard(self) -> None:
        """Lose what the cut withheld."""
        for _ in range(self._withheld):
            self._queue.popleft()
        self._withheld = 0

    def _arrive(self) -> None:
        if self.is_cut:
            self._withheld += 1
        else:
            self._queue.popleft()()


class MemoryNetwork:
    """A simulated network and all its hosts."""

    def __init__(
        self,
        seed: int = 0,
        *,
        latency_s: float = 0.0,
        bandwidth_bps: float = math.inf,
        loss: float = 0.0,
        silence_s: float = 15.0,
    ) -> None:
        """`silence_s`: a connection without a sign of life for so long is given up."""
        self.silence_s = silence_s
        self._rng = random.Random(seed)
        self._quality = Quality(latency_s, bandwidth_bps, loss)
        self._hosts: dict[PeerId, MemoryHost] = {}
        self._by_address: dict[str, MemoryHost] = {}
        self._directions: dict[tuple[PeerId, PeerId], _Direction] = {}
        self._numbers = itertools.count(1)
        self._routers: dict[PeerId, Router] = {}
        self._knocks: dict[tuple[PeerId, PeerId], float] = {}

    def host(self, peer: PeerId, *, on_fault: OnFault = log_fault) -> MemoryHost:
        """Return a new host; a dead one of the same PeerID is replaced. Raises LocalFault if it lives."""
        old = self._hosts.get(peer)
        if old is not None and old.alive:
            raise LocalFault(f"a host {short(peer)} runs already")
        maddr = old.maddr if old is not None else f"/memory/{next(self._numbers)}"
        host = self._hosts[peer] = self._by_address[maddr] = MemoryHost(self, peer, maddr, on_fault)
        return host

    def set_link(self, a: PeerId, b: PeerId, quality: Quality) -> None:
        """Set both directions between `a` and `b`, from now on."""
        self.direction(a, b).quality = self.direction(b, a).quality = quality

    def put_behind(self, peer: PeerId, router: Router) -> None:
        """Put `peer` behind a router of its own, from now on."""
        self._routers[peer] = router

    def is_cut(self, source: PeerId, target: PeerId) -> bool:
        """Whether nothing arrives in one or both directions."""
        both = map(self._directions.get, ((source, target), (target, source)))
        return any(direction is not None and direction.is_cut for direction in both)

    def knock(self, source: PeerId, target: PeerId) -> bool:
        """Send a first packet from `source` to `target`; whether the routers let it in.

        A port-keeping router lets a stranger in while its host has sent something to that stranger; a symmetric
        one maps each stranger to another port, so that only hosts that its own host dialled can answer.
        """
        now = asyncio.get_running_loop().time()
        self._knocks[source, target] = now
        router = self._routers.get(target)
        if router is None:
            return True
        is_open = now - self._knocks.get((target, source), -math.inf) <= HOLE_S
        return is_open and "symmetric" not in (router, self._routers.get(source))

    def is_public(self, maddr: str) -> bool:
        """Whether a stranger's first packet to this address is answered."""
        host = self._by_address.get(maddr)
        return host is not None and host.alive and host.peer_id not in self._routers

    def cut(self, side: Collection[PeerId], other: Collection[PeerId]) -> None:
        """Let nothing pass between the two sides; after `silence_s` their connections break."""
        loop = asyncio.get_running_loop()
        for a in side:
            for b in other:
                self.direction(a, b).is_cut = self.direction(b, a).is_cut = True
                loop.call_later(self.silence_s, self._give_up, a, b)

    def heal(self) -> None:
        """End all cuts and deliver what they withheld."""
        for direction in tuple(self._directions.values()):
            direction.heal()

    def kill(self, peer: PeerId) -> None:
        """Let the host's transport die: its streams end here at once, and at the other side after the latency."""
        self._hosts[peer].die()

    def revive(self, peer: PeerId) -> None:
        """Let a killed transport come back: same PeerID, same address, same handlers."""
        self._hosts[peer].come_back()

    def direction(self, source: PeerId, target: PeerId) -> _Direction:
        """Return the direction from `source` to `target`."""
        key = (source, target)
        if key not in self._directions:
            self._directions[key] = _Direction(self._quality)
        return self._directions[key]

    def send(self, source: PeerId, target: PeerId, size: int, action: Callable[[], None]) -> None:
        """Call `action` at `target` when `size` bytes have arrived."""
        self.direction(source, target).send(size, action, self._rng)

    def find(self, address: PeerAddress) -> MemoryHost | None:
        """Return the living host of that PeerID at one of those addresses."""
        for maddr in address.maddrs:
            host = self._by_address.get(maddr)
            if host is not None and host.alive and host.peer_id == address.peer:
                return host
        return None

    def living(self, peer: PeerId) -> MemoryHost | None:
        """Return the host of `peer` if it is alive."""
        host = self._hosts.get(peer)
        return host if host is not None and host.alive else None

    def maddr_of(self, peer: PeerId) -> str:
        """Address of `peer`, dead or alive."""
        return self._hosts[peer].maddr

    def _give_up(self, a: PeerId, b: PeerId) -> None:
        if not self.direction(a, b).is_cut:
            return
        for source, target in ((a, b), (b, a)):
            self.direction(source, target).discard()
            if (host := self.living(source)) is not None:
                host.disconnected(target)
