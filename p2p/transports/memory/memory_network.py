"""A seeded simulated network whose hosts obey the same interface as the real ones.

Latency, bandwidth and loss per link; partitions; hosts that die and come back. On `run_virtual` it is
deterministic and takes no real time; it also runs on a normal event loop.

Loss is modelled as on a reliable transport: a lost part arrives later by one retransmission time, and what
follows on the same link waits for it. A partition holds everything back; connections break when it lasts
longer than `silence_s`.
"""

import asyncio
import itertools
import math
import random
from collections.abc import Callable, Collection
from typing import Literal

from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.transports.inbound_stream import OnFault, log_fault
from atoll.p2p.transports.memory.memory_host import MemoryHost
from atoll.p2p.transports.memory.memory_link import Quality, Way
from atoll.protocols.errors import LocalFault
from atoll.protocols.ids import PeerId, short

__all__ = ["MemoryHost", "MemoryNetwork", "Quality"]

Router = Literal["port-keeping", "symmetric"]
HOLE_S = 30.0
"""A router forgets a hole through which nothing passed for so long."""


class MemoryNetwork:
    """All hosts of one simulated world."""

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
        self._luck = random.Random(seed)
        self._quality = Quality(latency_s, bandwidth_bps, loss)
        self._hosts: dict[PeerId, MemoryHost] = {}
        self._by_address: dict[str, MemoryHost] = {}
        self._ways: dict[tuple[PeerId, PeerId], Way] = {}
        self._numbers = itertools.count(1)
        self._routers: dict[PeerId, Router] = {}
        self._knocks: dict[tuple[PeerId, PeerId], float] = {}

    def host(self, peer: PeerId, *, on_fault: OnFault = log_fault) -> MemoryHost:
        """A new host; one that served under the same PeerID before is replaced. Raises LocalFault if it lives."""
        old = self._hosts.get(peer)
        if old is not None and old.alive:
            raise LocalFault(f"a host {short(peer)} runs already")
        maddr = old.maddr if old is not None else f"/memory/{next(self._numbers)}"
        host = self._hosts[peer] = self._by_address[maddr] = MemoryHost(self, peer, maddr, on_fault)
        return host

    def set_link(self, a: PeerId, b: PeerId, quality: Quality) -> None:
        """Both directions between `a` and `b`, from now on."""
        self.way(a, b).quality = self.way(b, a).quality = quality

    def put_behind(self, peer: PeerId, router: Router) -> None:
        """From now on `peer` is behind a router of its own."""
        self._routers[peer] = router

    def knock(self, source: PeerId, target: PeerId) -> bool:
        """`source` sends a first packet to `target`; whether the routers let it in.

        A port-keeping router lets a stranger in while its host has sent something to that stranger; a symmetric
        one shows each stranger another port, so that nobody can answer but those whom its host dialled.
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
        """Nothing passes between the two sides; after `silence_s` their connections break."""
        loop = asyncio.get_running_loop()
        for a in side:
            for b in other:
                ways = self.way(a, b), self.way(b, a)
                for way in ways:
                    way.cut = True
                loop.call_later(self.silence_s, self._give_up, a, b)

    def heal(self) -> None:
        """All cuts end; what was held back arrives."""
        for way in tuple(self._ways.values()):
            way.mend()

    def kill(self, peer: PeerId) -> None:
        """The host's transport dies: its streams end here at once, and over there after the latency."""
        self._hosts[peer].die()

    def revive(self, peer: PeerId) -> None:
        """It is back: same PeerID, same address, same handlers."""
        self._hosts[peer].come_back()

    def way(self, source: PeerId, target: PeerId) -> Way:
        """The direction from `source` to `target`."""
        key = (source, target)
        if key not in self._ways:
            self._ways[key] = Way(self._quality)
        return self._ways[key]

    def send(self, source: PeerId, target: PeerId, size: int, action: Callable[[], None]) -> None:
        """`action` happens at `target` when `size` bytes have arrived."""
        self.way(source, target).send(size, action, self._luck)

    def find(self, address: PeerAddress) -> MemoryHost | None:
        """The living host that answers there under that name."""
        for maddr in address.maddrs:
            host = self._by_address.get(maddr)
            if host is not None and host.alive and host.peer_id == address.peer:
                return host
        return None

    def living(self, peer: PeerId) -> MemoryHost | None:
        """The host named `peer`, unless it is dead."""
        host = self._hosts.get(peer)
        return host if host is not None and host.alive else None

    def believes(self, peer: PeerId, other: PeerId) -> bool:
        """Whether the living host `peer` thinks that it is connected to `other`."""
        host = self.living(peer)
        return host is not None and host.holds(other)

    def lost(self, peer: PeerId, other: PeerId) -> None:
        """`peer` hears that its connection to `other` is gone."""
        if (host := self._hosts.get(peer)) is not None:
            host.lose(other)

    def maddr_of(self, peer: PeerId) -> str:
        """Where `peer` is, dead or alive."""
        return self._hosts[peer].maddr

    def _give_up(self, a: PeerId, b: PeerId) -> None:
        if not self.way(a, b).cut:
            return
        for source, target in ((a, b), (b, a)):
            self.way(source, target).forget()
            self.lost(source, target)
