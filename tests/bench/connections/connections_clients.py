"""Child of `bench connections`: many libp2p identities in one process, each with one connection to the node.

py-libp2p over TCP, Noise and yamux: each is authenticated and answers identify. Orders: connect, greet, alive.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable

import trio

from atoll.p2p.host.framing import framed
from atoll.p2p.host.interface import DIAL_S, PeerAddress
from atoll.p2p.rpc import frames
from atoll.p2p.transports.pylibp2p.connection import Upgrader
from atoll.p2p.transports.pylibp2p.engine import Callbacks, Engine
from atoll.p2p.transports.pylibp2p.trio_bridge import Guest, trio_guest
from atoll.p2p.transports.pylibp2p.yamux import Lane
from atoll.protocols import codec
from atoll.protocols.errors import Unreachable
from atoll.protocols.ids import PeerId
from atoll_bench.calls.calls_atoll import RUN
from atoll_bench.child import obey

_KEEPALIVE_S = 30.0
"""As seldom as p2pd's own, so that idle is idle."""
_AT_ONCE = 8


class Crowd:
    """All identities of this process."""

    def __init__(self, guest: Guest) -> None:
        self._guest = guest
        self._node: PeerAddress | None = None
        self._engines: list[Engine] = []
        self._lanes: list[Lane] = []

    async def connect(self, peer: str, maddrs: list[str], count: int) -> int:
        """So many more identities; how many are connected afterwards."""
        self._node = PeerAddress(PeerId(peer), tuple(maddrs))
        await self._guest.call(lambda: _each(self._one, range(count)))
        return await self.alive()

    async def greet(self) -> int:
        """Every identity opens a stream of calls, as a member does; how many streams there are."""
        await self._guest.call(lambda: _each(self._greet, self._engines))
        return len(self._lanes)

    async def alive(self) -> int:
        """Identities that are connected."""
        return sum(1 for engine in self._engines if engine.links())

    async def _one(self, _number: int) -> None:
        """A connection that cannot be made is missing in the count, and that is what is measured."""
        assert self._guest.nursery is not None
        assert self._node is not None
        engine = Engine(Upgrader(os.urandom(32), _KEEPALIVE_S), (), 1, _DEAF)
        up = trio.Event()
        self._guest.nursery.start_soon(engine.run, (), lambda _maddrs: up.set())
        await up.wait()
        try:
            await engine.dial(self._node, DIAL_S)
        except Unreachable:
            return
        self._engines.append(engine)

    async def _greet(self, engine: Engine) -> None:
        for link in engine.links():
            try:
                lane = await link.open(frames.PROTOCOL)
            except Unreachable:
                continue
            await lane.write(framed(codec.encode(frames.hello(RUN, engine.peer_id, "bench"))))
            self._lanes.append(lane)


_DEAF = Callbacks(
    connected=lambda _peer: None,
    disconnected=lambda _peer: None,
    inbound=lambda _peer, _protocol, _lane: None,
    ending=lambda: None,
)
"""Nobody asks these identities for anything."""


async def _each(act: Callable[..., Awaitable[None]], items: "range | list[Engine]") -> None:
    """A few at one time."""
    limiter = trio.CapacityLimiter(_AT_ONCE)

    async def one(item: object) -> None:
        async with limiter:
            await act(item)

    async with trio.open_nursery() as nursery:
        for item in items:
            nursery.start_soon(one, item)


async def main() -> None:
    """Until standard input ends."""
    async with trio_guest() as guest:
        crowd = Crowd(guest)
        await obey({"connect": crowd.connect, "greet": crowd.greet, "alive": crowd.alive})


if __name__ == "__main__":
    asyncio.run(main())
