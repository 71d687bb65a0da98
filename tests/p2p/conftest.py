"""One way to run a scenario on every transport.

`run_lab(scenario)` gives `scenario` a Lab: hosts that serve, on p2pd or py-libp2p over loopback in real time or
in memory on virtual time. Afterwards everything is stopped and the lab checks that nothing is left.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Mapping

import pytest

from atoll.p2p.host.interface import Handler, Host, PeerAddress
from atoll.p2p.transports.memory.memory_network import MemoryHost, MemoryNetwork
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.p2p.transports.p2pd.p2pd_host import P2pdHost
from atoll.p2p.transports.pylibp2p.pylibp2p_host import PyLibp2pHost
from atoll.protocols.errors import PeerFault
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId
from tests.waiting import HANGS_S


class Lab:
    """Hosts of one test."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.faults: list[tuple[PeerId, PeerFault]] = []
        self._group: asyncio.TaskGroup
        self._tasks: dict[PeerId, asyncio.Task[None]] = {}
        self._network = MemoryNetwork(seed=1, latency_s=0.01, bandwidth_bps=800e6)

    async def host(
        self, handlers: Mapping[str, Handler] | None = None, prepare: Callable[[Host], None] | None = None
    ) -> Host:
        """A new host that serves. `prepare` sets handlers, too: those set later take a moment to be known."""
        identity = Identity(bytes([len(self._tasks) + 1]) * 32)
        host = self._make(identity)
        for protocol, handler in (handlers or {}).items():
            host.set_handler(protocol, handler)
        if prepare is not None:
            prepare(host)
        ready = asyncio.Event()
        self._tasks[host.peer_id] = self.spawn(host.serve(ready.set))
        await ready.wait()
        return host

    def _make(self, identity: Identity) -> Host:
        def on_fault(peer: PeerId, fault: PeerFault) -> None:
            self.faults.append((peer, fault))

        if self.transport == "memory":
            return self._network.host(identity.peer_id, on_fault=on_fault)
        if self.transport == "pylibp2p":
            return PyLibp2pHost(identity, on_fault=on_fault)
        return P2pdHost(identity, on_fault=on_fault, poll_s=0.1)

    async def pair(self, handlers: Mapping[str, Handler] | None = None) -> tuple[Host, Host]:
        """Two hosts; the first is connected to the second, which has the handlers."""
        a, b = await self.host(), await self.host(handlers)
        await a.connect(await address_of(b))
        return a, b

    def spawn(self, work: Awaitable[None]) -> "asyncio.Task[None]":
        """A task that ends with the lab."""
        return self._group.create_task(work)

    async def stop(self, host: Host) -> None:
        """End `serve` of a host."""
        self._tasks[host.peer_id].cancel()
        await asyncio.wait([self._tasks[host.peer_id]])

    def kill_transport(self, host: Host) -> None:
        """The transport dies under the host; it comes back by itself."""
        if isinstance(host, P2pdHost):
            os.kill(host.process_id, signal.SIGKILL)
        elif isinstance(host, PyLibp2pHost):
            host._engine.nursery.start_soon(break_down)
        else:
            assert isinstance(host, MemoryHost)
            self._network.kill(host.peer_id)
            asyncio.get_running_loop().call_later(0.5, self._network.revive, host.peer_id)

    async def run(self, scenario: Callable[["Lab"], Awaitable[None]]) -> None:
        """The scenario within a deadline, then the end of everything."""
        async with asyncio.TaskGroup() as self._group:
            started: list[asyncio.Task[None]] = []
            spawn = self._group.create_task

            def remember(work, **options):
                started.append(spawn(work, **options))
                return started[-1]

            self._group.create_task = remember  # the group's own tasks end with the scenario
            try:
                async with asyncio.timeout(3600 if self.transport == "memory" else HANGS_S):
                    await scenario(self)
            finally:
                for task in started:
                    task.cancel()


async def break_down() -> None:
    """A bug inside the engine of a transport that runs in our own process."""
    raise RuntimeError("a bug")


async def address_of(host: Host) -> PeerAddress:
    """Where `host` may be dialled."""
    return PeerAddress(host.peer_id, await host.addresses())


def run_real(main: Awaitable[None]) -> None:
    """Like asyncio.run, with asyncio's debug checks."""
    with asyncio.Runner(debug=False) as runner:
        runner.run(main)


@pytest.fixture(
    params=[
        "memory",
        pytest.param("p2pd", marks=pytest.mark.network),
        pytest.param("pylibp2p", marks=pytest.mark.network),
    ]
)
def run_lab(request, tmp_path_factory, monkeypatch):
    """Run a scenario on one transport; all get their turn."""
    transport = request.param
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setattr("tempfile.tempdir", str(folder))

    def run(scenario):
        (run_virtual if transport == "memory" else run_real)(Lab(transport).run(scenario))
        assert os.listdir(folder) == [], "the host left files in the temporary folder"

    return run


@pytest.fixture
def run_memory():
    """Run a scenario in memory only: for what sits above the transports."""
    return lambda scenario: run_virtual(Lab("memory").run(scenario))


@pytest.fixture
def dial():
    """The address of a host."""
    return address_of
