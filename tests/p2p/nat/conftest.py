"""A world of routed hosts on the simulated network: public ones and ones behind routers of both kinds."""

import asyncio
import random
from collections.abc import Callable

import pytest

from atoll.p2p.host.framing import read_frame, write_frame
from atoll.p2p.host.interface import Connection, Handler, Host, PeerAddress, Stream
from atoll.p2p.nat.nat_protocol import Clocks
from atoll.p2p.nat.relay import RelayLimits
from atoll.p2p.nat.route_host import RouteHost, RouteOptions
from atoll.p2p.transports.memory.memory_network import MemoryHost, MemoryNetwork, Router
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId, RunId, digest

RUN = RunId(digest(b"run of the NAT tests"))
ECHO = "/test/echo/1"


async def echo(stream: Stream) -> None:
    while frame := await read_frame(stream, 1 << 22):
        await write_frame(stream, frame)


class World:
    """Hosts by number; even addresses are memory ones, and all of them count as outside."""

    run = RUN

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self.group = group
        self.network = MemoryNetwork(seed=3, latency_s=0.03, silence_s=5.0)
        self.hosts: dict[int, RouteHost] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.faults: list[tuple[PeerId, str]] = []

    async def host(
        self,
        number: int,
        router: Router | None = None,
        *,
        relay: RelayLimits | None = None,
        relay_only: bool = False,
        trusted: tuple[int, ...] = (),
        run: RunId = RUN,
        is_outside: Callable[[str], bool] = lambda maddr: True,
        is_stopped: Callable[[], bool] = bool,
        wrap: Callable[[Host], Host] = lambda host: host,
    ) -> RouteHost:
        """`wrap` puts a host between the transport and its routes, as a node puts its limits there."""
        identity = Identity(bytes([number]) * 32)
        base = self.network.host(identity.peer_id)
        if router:
            self.network.put_behind(identity.peer_id, router)

        async def probe(maddr: str) -> bool:
            return self.network.is_public(maddr)

        options = RouteOptions(
            relay=relay,
            relay_only=relay_only,
            trusted=frozenset(self.hosts[n].peer_id for n in trusted),
            is_outside=is_outside,
            is_stopped=is_stopped,
            probe=probe,
        )
        loop = asyncio.get_running_loop()
        clocks = Clocks(loop.time, lambda: 1e9 + loop.time())
        host = RouteHost(
            wrap(base),
            identity,
            run,
            options,
            clocks=clocks,
            rng=random.Random(number),
            on_fault=lambda peer, fault: self.faults.append((peer, str(fault))),
        )
        host.set_handler(ECHO, echo)
        up = asyncio.Event()
        self.hosts[number] = host
        self.tasks[number] = self.group.create_task(host.serve(up.set))
        await up.wait()
        return host

    async def plain(self, number: int, handlers: dict[str, Handler]) -> MemoryHost:
        """A host without routes: the test speaks for it."""
        base = self.network.host(Identity(bytes([number]) * 32).peer_id)
        for protocol, handler in handlers.items():
            base.set_handler(protocol, handler)
        up = asyncio.Event()
        self.tasks[number] = self.group.create_task(base.serve(up.set))
        await up.wait()
        return base

    async def meet(self, a: int, b: int) -> None:
        """`a` dials `b` where `b` says that it is."""
        await self.hosts[a].connect(PeerAddress(self.hosts[b].peer_id, await self.hosts[b].addresses()))

    async def path(self, a: int, b: int) -> Connection | None:
        for connection in await self.hosts[a].connections():
            if connection.peer == self.hosts[b].peer_id:
                return connection
        return None

    async def say(self, a: int, b: int, data: bytes) -> bytes:
        stream = await self.hosts[a].open_stream(self.hosts[b].peer_id, ECHO)
        await write_frame(stream, data)
        answer = await read_frame(stream, 1 << 22)
        await stream.close()
        return answer

    async def kill(self, number: int) -> None:
        self.tasks[number].cancel()
        await asyncio.wait([self.tasks[number]])

    def end(self) -> None:
        for task in self.tasks.values():
            task.cancel()


@pytest.fixture
def run_world():
    """Run a scenario in a fresh world on virtual time."""

    def run(scenario: Callable[[World], object]) -> None:
        async def main() -> None:
            async with asyncio.timeout(1e6), asyncio.TaskGroup() as group:
                world = World(group)
                await scenario(world)
                world.end()

        run_virtual(main())

    return run
