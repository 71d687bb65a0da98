"""The dial loop never gives up, backs off, keeps a cache, and finds the other half of a split swarm."""

import asyncio
import itertools
import random
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from atoll.p2p.discovery import FIRST_BACKOFF_S, MAX_BACKOFF_S, Discovery, backoff_s
from atoll.p2p.host import HostEvent, PeerAddress, PeerConnected, PeerDisconnected
from atoll.p2p.transports.memory import MemoryHost, MemoryNetwork
from atoll.p2p.transports.virtual_time import run_virtual
from atoll.protocols.errors import Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId


def peer(number: int) -> PeerId:
    return Identity(number.to_bytes(32, "big")).peer_id


class CountingHost(MemoryHost):
    """Counts dials."""

    dials: list[tuple[float, PeerId]]

    async def connect(self, address: PeerAddress) -> None:
        self.dials.append((asyncio.get_running_loop().time(), address.peer))
        await super().connect(address)


class Node:
    """A host with a dial loop."""

    def __init__(
        self, network: MemoryNetwork, number: int, seeds: list[PeerAddress], cache: Path, target: int = 4
    ):
        self.host = network.host(peer(number))
        self.host.__class__ = CountingHost
        self.host.dials = []
        now = asyncio.get_running_loop().time
        self.discovery = Discovery(self.host, seeds, cache, now=now, rng=random.Random(number), target=target)

    async def serve(self, ready) -> None:
        events = self.host.events()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.host.serve(ready))
            group.create_task(self._follow(events))
            await asyncio.sleep(0)
            group.create_task(self.discovery.serve())

    async def _follow(self, events) -> None:
        event: HostEvent
        async for event in events:
            match event:
                case PeerConnected(other):
                    self.discovery.on_connected(other)
                case PeerDisconnected(other):
                    self.discovery.on_disconnected(other)

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(self.host.peer_id, (self.host.maddr,))


async def start(group: asyncio.TaskGroup, *nodes: Node) -> list[asyncio.Task[None]]:
    tasks = []
    for node in nodes:
        ready = asyncio.Event()
        tasks.append(group.create_task(node.serve(ready.set)))
        await ready.wait()
    return tasks


def run(main, seed: int = 0) -> None:
    async def with_group() -> None:
        async with asyncio.TaskGroup() as group:
            await main(group)
            raise Unreachable("over")

    try:
        run_virtual(with_group(), seed)
    except* Unreachable:
        pass


def test_a_dead_seed_is_tried_for_ever_with_back_off_and_a_reason(tmp_path: Path) -> None:
    async def main(group: asyncio.TaskGroup) -> None:
        network = MemoryNetwork()
        dead = PeerAddress(peer(9), ("/memory/99",))
        node = Node(network, 1, [dead, PeerAddress(peer(1), ("/memory/1",))], tmp_path / "peers.json")
        await start(group, node)
        await asyncio.sleep(3600)
        times = [at for at, _ in node.host.dials]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert 40 < len(times) < 150
        assert max(gaps) <= 1.5 * MAX_BACKOFF_S + 2
        assert min(gaps[-20:]) >= 0.5 * MAX_BACKOFF_S - 1
        table = node.discovery.table()
        assert "nobody answers" in table[f"/memory/99/p2p/{peer(9)}"]
        assert "tried" in table[f"/memory/99/p2p/{peer(9)}"]
        assert table[f"/memory/1/p2p/{peer(1)}"] == "this node"

        late = network.host(peer(9))
        network._by_address["/memory/99"] = late
        ready = asyncio.Event()
        group.create_task(late.serve(ready.set))
        await asyncio.sleep(2 * MAX_BACKOFF_S)
        assert node.discovery.table()[f"/memory/99/p2p/{peer(9)}"] == "connected"

    run(main)


def test_it_keeps_to_the_target_but_explores(tmp_path: Path) -> None:
    async def main(group: asyncio.TaskGroup) -> None:
        network = MemoryNetwork()
        others = [Node(network, number, [], tmp_path / f"{number}.json") for number in range(10, 20)]
        node = Node(network, 1, [], tmp_path / "peers.json", target=3)
        await start(group, node, *others)
        for other in others:
            node.discovery.learn(other.host.peer_id, other.address.maddrs, "exchange")
        await asyncio.sleep(20)
        assert len(await node.host.connections()) == 3
        await asyncio.sleep(300)
        assert 4 <= len(await node.host.connections()) <= 9, "one more per minute, so that halves meet"

    run(main)


def test_yesterdays_peers_are_seeds_today(tmp_path: Path) -> None:
    async def main(group: asyncio.TaskGroup) -> None:
        network = MemoryNetwork()
        other = Node(network, 2, [], tmp_path / "other.json")
        await start(group, other)
        first = Node(network, 1, [other.address], tmp_path / "peers.json")
        (task,) = await start(group, first)
        await asyncio.sleep(5)
        task.cancel()
        await asyncio.wait([task])
        again = Node(network, 1, [], tmp_path / "peers.json")
        await start(group, again)
        await asyncio.sleep(5)
        assert [connection.peer for connection in await again.host.connections()] == [peer(2)]

    run(main)


def test_a_lost_peer_is_dialled_soon_and_one_that_hangs_up_is_not(tmp_path: Path) -> None:
    async def main(group: asyncio.TaskGroup) -> None:
        network = MemoryNetwork()
        other = Node(network, 2, [], tmp_path / "other.json")
        node = Node(network, 1, [other.address], tmp_path / "peers.json")
        await start(group, other, node)
        await asyncio.sleep(100)
        await other.host.disconnect(peer(1))
        await asyncio.sleep(3)
        assert node.discovery.table() == {f"{other.host.maddr}/p2p/{peer(2)}": "connected"}
        before = len(node.host.dials)
        for _ in range(600):
            if await other.host.connections():
                await other.host.disconnect(peer(1))
            await asyncio.sleep(1)
        assert len(node.host.dials) - before < 40, "hanging up at once counts as a failed dial"

    run(main)


def test_the_network_that_comes_back_brings_all_peers_back_soon(tmp_path: Path) -> None:
    async def main(group: asyncio.TaskGroup) -> None:
        network = MemoryNetwork()
        others = [Node(network, number, [], tmp_path / f"{number}.json") for number in range(10, 14)]
        node = Node(network, 1, [other.address for other in others], tmp_path / "peers.json", target=8)
        await start(group, node, *others)
        await asyncio.sleep(60)
        assert len(await node.host.connections()) == 4
        network.cut([peer(1)], [peer(number) for number in range(10, 14)])
        await asyncio.sleep(1800)
        assert not await node.host.connections()
        network.heal()
        counts = [0]
        while counts[-1] < 4:
            await asyncio.sleep(1)
            counts.append(len(await node.host.connections()))
            assert len(counts) < 2 * MAX_BACKOFF_S
        assert len([count for count in counts if 0 < count < 4]) <= 4, "the first brings the others"

    run(main, seed=2)


@given(st.integers(1, 10_000), st.integers())
def test_back_off_grows_is_capped_and_never_zero(failures: int, seed: int) -> None:
    wait_s = backoff_s(failures, random.Random(seed))
    nominal = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(failures - 1, 16))
    assert 0.5 * nominal <= wait_s <= 1.5 * nominal
