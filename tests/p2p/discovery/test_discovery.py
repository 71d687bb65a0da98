"""The dial loop never gives up, backs off, keeps a cache, and finds the other half of a split swarm."""

import asyncio
import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.p2p.discovery.discovery import LOST_AT_ONCE, LOST_S, Discovery
from atoll.p2p.discovery.dns import TxtRecords
from atoll.p2p.discovery.seed_table import SeedRow, row_text, short_text, short_texts
from atoll.p2p.host.interface import DIAL_S, HostEvent, PeerAddress, PeerConnected, PeerDisconnected
from atoll.p2p.membership.address_book import CACHED_PEERS, AddressBook, parse_seed
from atoll.p2p.system.waiting import FIRST_S as FIRST_BACKOFF_S
from atoll.p2p.system.waiting import MAX_S as MAX_BACKOFF_S
from atoll.p2p.system.waiting import backoff_s
from atoll.p2p.transports.memory.memory_network import MemoryHost, MemoryNetwork
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.p2p.transports.p2pd.p2pd_host import P2pdHost
from atoll.p2p.transports.p2pd.process import P2pdOptions
from atoll.protocols.errors import Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId
from tests.waiting import eventually


def peer(number: int) -> PeerId:
    return Identity(number.to_bytes(32, "big")).peer_id


class CountingHost(MemoryHost):
    """Counts dials."""

    dials: list[tuple[float, PeerId]]

    async def connect(self, address: PeerAddress, within_s: float = DIAL_S) -> None:
        self.dials.append((asyncio.get_running_loop().time(), address.peer))
        await super().connect(address, within_s)


class Node:
    """A host with a dial loop."""

    def __init__(
        self, network: MemoryNetwork, number: int, seeds: list[PeerAddress], cache: Path, target: int = 4, **more
    ):
        self.host = network.host(peer(number))
        self.host.__class__ = CountingHost
        self.host.dials = []
        now = asyncio.get_running_loop().time
        rng = random.Random(number)
        self.discovery = Discovery(self.host, seeds, cache, now=now, rng=rng, target=target, **more)

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


def test_a_lost_peer_is_unreachable_once_a_dial_failed(tmp_path: Path) -> None:
    async def main(group: asyncio.TaskGroup) -> None:
        network = MemoryNetwork()
        other = Node(network, 2, [], tmp_path / "other.json")
        node = Node(network, 1, [other.address], tmp_path / "peers.json")
        await start(group, other, node)
        assert not node.discovery.is_unreachable(peer(2)), "never tried"
        await asyncio.sleep(5)
        await node.host.disconnect(peer(2))
        await asyncio.sleep(0)
        assert not node.discovery.is_unreachable(peer(2)), "hung up soon, which is no failed dial"
        await asyncio.sleep(100)
        assert await node.host.connections(), "it was dialled again"
        network.kill(peer(2))
        await asyncio.sleep(0.01)
        dials = len(node.host.dials)
        while len(node.host.dials) == dials:
            assert not node.discovery.is_unreachable(peer(2))
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert node.discovery.is_unreachable(peer(2))
        network.revive(peer(2))
        await asyncio.sleep(200)
        assert await node.host.connections()
        assert not node.discovery.is_unreachable(peer(2))

    run(main)


def test_a_lost_peer_is_dialled_as_soon_as_it_is_due(tmp_path: Path) -> None:
    """Rounds wait for the failure of this dial."""

    async def main(group: asyncio.TaskGroup) -> None:
        network = MemoryNetwork()
        other = Node(network, 2, [], tmp_path / "other.json")
        node = Node(network, 1, [other.address], tmp_path / "peers.json")
        await start(group, other, node)
        for _ in range(5):
            await asyncio.sleep(100.3)
            dials = len(node.host.dials)
            network.kill(peer(2))
            await asyncio.sleep(0.001)
            due_s = node.discovery.book.get(peer(2)).next_dial
            await asyncio.sleep(2.5)
            assert node.host.dials[dials][0] - due_s < 0.01
            network.revive(peer(2))

    run(main)


def test_a_peer_that_dies_twice_is_unreachable_as_soon_as_the_first_time(tmp_path: Path) -> None:
    """Rounds wait longer for a member that was lost and that no dial has missed."""

    async def main(group: asyncio.TaskGroup) -> None:
        network = MemoryNetwork()
        other = Node(network, 2, [], tmp_path / "other.json")
        node = Node(network, 1, [other.address], tmp_path / "peers.json")
        await start(group, other, node)
        await asyncio.sleep(100)
        for _ in range(3):
            network.kill(peer(2))
            await asyncio.sleep(1.5)
            assert node.discovery.is_unreachable(peer(2))
            await asyncio.sleep(6.5)
            network.revive(peer(2))
            await other.host.connect(node.address)
            await asyncio.sleep(7)

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


@pytest.mark.parametrize("seed", range(4))
def test_the_sides_of_a_long_partition_meet_soon_after_it(tmp_path: Path, seed: int) -> None:
    """One node on each side: neither has anybody who could have met the other side before."""

    async def main(group: asyncio.TaskGroup) -> None:
        network = MemoryNetwork()
        other = Node(network, 10 + seed, [], tmp_path / "other.json")
        node = Node(network, 20 + seed, [other.address], tmp_path / "peers.json")
        await start(group, other, node)
        await asyncio.sleep(60)
        network.cut([node.host.peer_id], [other.host.peer_id])
        await asyncio.sleep(480 + 7.3 * seed)
        dials = len(node.host.dials)
        network.heal()
        await asyncio.sleep(6)
        assert await node.host.connections()
        assert dials <= 14 * 9, "14 a minute, and it is no flood"

    run(main, seed=seed)


def test_the_sides_meet_within_three_seconds_in_half_of_the_cases(tmp_path: Path) -> None:
    """A dial into a cut hangs on the virtual network too, and gets through at its retransmissions only."""
    took_s = []

    async def main(group: asyncio.TaskGroup) -> None:
        network = MemoryNetwork()
        pairs = []
        for number in range(40):
            other = Node(network, 100 + number, [], tmp_path / f"other-{number}.json")
            node = Node(network, 200 + number, [other.address], tmp_path / f"{number}.json")
            await start(group, other, node)
            pairs.append((node, other))
        await asyncio.sleep(60)
        for node, other in pairs:
            network.cut([node.host.peer_id], [other.host.peer_id])
        await asyncio.sleep(240)
        network.heal()
        waiting = dict(pairs)
        for step in range(100):
            await asyncio.sleep(0.1)
            for node in [node for node in waiting if await node.host.connections()]:
                took_s.append(0.1 * step)
                del waiting[node]

    run(main)
    assert len(took_s) == 40
    assert sorted(took_s)[20] <= 3
    assert max(took_s) <= 6


def test_a_lost_peer_to_which_dials_take_long_is_reached_too(tmp_path: Path) -> None:
    async def main(group: asyncio.TaskGroup) -> None:
        network = MemoryNetwork(latency_s=2.4)
        other = Node(network, 10, [], tmp_path / "other.json")
        node = Node(network, 1, [other.address], tmp_path / "peers.json")
        await start(group, other, node)
        await asyncio.sleep(60)
        network.cut([peer(1)], [peer(10)])
        await asyncio.sleep(120)
        network.heal()
        await asyncio.sleep(30)
        assert await connected(node)

    run(main)


def test_few_dials_to_lost_peers_hang_at_once(tmp_path: Path) -> None:
    async def main(group: asyncio.TaskGroup) -> None:
        network = MemoryNetwork()
        others = [Node(network, number, [], tmp_path / f"{number}.json") for number in range(10, 30)]
        node = Node(network, 1, [other.address for other in others], tmp_path / "peers.json", target=20)
        await start(group, node, *others)
        await asyncio.sleep(60)
        assert len(await connected(node)) == 20
        network.cut([peer(1)], [other.host.peer_id for other in others])
        await asyncio.sleep(30)
        before = len(node.host.dials)
        for _ in range(600):
            await asyncio.sleep(0.1)
            assert len(node.discovery._dialling) <= LOST_AT_ONCE
        assert 60 <= len(node.host.dials) - before <= 15 * LOST_AT_ONCE
        assert len({dialled for _, dialled in node.host.dials[before:]}) == 20, "all have their turns"

    run(main)


def test_a_peer_that_is_lost_for_an_hour_is_dialled_as_rarely_as_any_other(tmp_path: Path) -> None:
    async def main(group: asyncio.TaskGroup) -> None:
        network = MemoryNetwork()
        other = Node(network, 10, [], tmp_path / "other.json")
        node = Node(network, 1, [other.address], tmp_path / "peers.json")
        await start(group, other, node)
        await asyncio.sleep(60)
        network.cut([peer(1)], [peer(10)])
        await asyncio.sleep(LOST_S + 600)
        since = asyncio.get_running_loop().time()
        await asyncio.sleep(1800)
        times = [at for at, _ in node.host.dials if at > since]
        assert min(later - earlier for earlier, later in itertools.pairwise(times)) >= 0.5 * MAX_BACKOFF_S - 1

    run(main)


@given(st.integers(1, 10_000), st.integers())
def test_back_off_grows_is_capped_and_never_zero(failures: int, seed: int) -> None:
    wait_s = backoff_s(failures, random.Random(seed))
    nominal = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(failures - 1, 16))
    assert 0.5 * nominal <= wait_s <= 1.5 * nominal


# Seeds that are dead, and lives without them.


DEAD = [PeerAddress(peer(number), (f"/memory/{number}",)) for number in range(900, 1000)]


async def connected(node: Node) -> set[PeerId]:
    return {connection.peer for connection in await node.host.connections()}


async def stopped(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def test_a_living_seed_does_not_wait_behind_dead_ones_that_hang(tmp_path: Path) -> None:
    async def main(group: asyncio.TaskGroup) -> None:
        network = MemoryNetwork()
        alive = Node(network, 2, [], tmp_path / "alive.json")
        node = Node(network, 1, [*DEAD[:20], alive.address], tmp_path / "peers.json")
        hung = set()

        async def connect(address: PeerAddress, within_s: float = DIAL_S) -> None:
            if address != alive.address:
                hung.add(address.peer)
                await asyncio.Event().wait()
            await MemoryHost.connect(node.host, address)

        node.host.connect = connect
        await start(group, alive, node)
        await asyncio.sleep(3)
        assert await connected(node) == {peer(2)}
        assert 0 < len(hung) <= 20
        rows = {row.state for row in node.discovery.rows() if row.seed.startswith("/memory/9")}
        assert rows <= {"dialling", "not tried yet"}
        await asyncio.sleep(600)
        reasons = {row.reason for row in node.discovery.rows() if row.state == "failed"}
        assert reasons == {"no answer in 15 s"}
        assert len(hung) == 20, "the others go on"

    run(main)


def test_yesterdays_swarm_is_joined_though_the_seed_is_dead(tmp_path: Path) -> None:
    async def main(group: asyncio.TaskGroup) -> None:
        network = MemoryNetwork()
        seed = Node(network, 2, [], tmp_path / "seed.json")
        others = [Node(network, number, [seed.address], tmp_path / f"{number}.json") for number in range(10, 14)]
        node = Node(network, 1, [seed.address], tmp_path / "peers.json", target=8)
        running = await start(group, seed, *others, node)
        for other in others:
            node.discovery.learn(other.host.peer_id, other.address.maddrs, "exchange")
        await asyncio.sleep(30)
        assert len(await connected(node)) == 5
        await stopped(running[-1])
        await stopped(running[0])

        offline = Node(network, 1, [seed.address], tmp_path / "peers.json")
        network.cut([peer(1)], [peer(number) for number in (2, *range(10, 14))])
        (task,) = await start(group, offline)
        await asyncio.sleep(600)
        assert await connected(offline) == set()
        await stopped(task)
        network.heal()

        again = Node(network, 1, [seed.address], tmp_path / "peers.json", target=8)
        (task,) = await start(group, again)
        await asyncio.sleep(5)
        assert await connected(again) == {peer(number) for number in range(10, 14)}
        (row,) = again.discovery.rows()
        assert (row.state, row.tries > 0) == ("failed", True)
        await stopped(task)

    run(main)


def test_a_cache_of_dead_peers_does_not_hide_a_living_seed(tmp_path: Path) -> None:
    async def main(group: asyncio.TaskGroup) -> None:
        network = MemoryNetwork()
        old = AddressBook(peer(1))
        for address in DEAD[:CACHED_PEERS]:
            old.add(address.peer, address.maddrs, "exchange")
            old.connected(address.peer, 0.0)
        old.save(tmp_path / "peers.json")
        seed = Node(network, 2, [], tmp_path / "seed.json")
        node = Node(network, 1, [seed.address], tmp_path / "peers.json")
        (task, *_) = await start(group, node, seed)
        await asyncio.sleep(1)
        assert await connected(node) == {peer(2)}
        await asyncio.sleep(60)
        await stopped(task)
        today = AddressBook(peer(1))
        assert today.load(tmp_path / "peers.json") == CACHED_PEERS
        first, *rest = today.all()
        assert (first.peer, first.misses) == (peer(2), 0), "who answered today stands first"
        assert {known.misses for known in rest} <= {0, 1}
        assert sorted(rest, key=lambda known: known.misses) == rest
        assert 1 in {known.misses for known in rest}, "the others are kept, but sink"

    run(main)


def test_a_cache_that_cannot_be_read_does_not_stop_a_node(tmp_path: Path) -> None:
    async def main(group: asyncio.TaskGroup) -> None:
        network = MemoryNetwork()
        (tmp_path / "peers.json").mkdir()
        (tmp_path / "huge.json").write_bytes(bytes(2 << 20))
        seed = Node(network, 2, [], tmp_path / "huge.json")
        node = Node(network, 1, [seed.address], tmp_path / "peers.json")
        await start(group, seed, node)
        await asyncio.sleep(60)
        assert await connected(node) == {peer(2)}

    run(main)


def test_a_seed_by_name_joins_late_and_never_holds_up_the_others(tmp_path: Path) -> None:
    async def main(group: asyncio.TaskGroup) -> None:
        network = MemoryNetwork()
        named, plain = Node(network, 2, [], tmp_path / "2.json"), Node(network, 3, [], tmp_path / "3.json")
        records: list[bytes] = []

        async def lookup(name: str) -> TxtRecords:
            assert name == "_dnsaddr.seed.example.org"
            if not records:
                await asyncio.sleep(3)
                raise Unreachable(f"the DNS name {name} does not exist")
            return TxtRecords(tuple(records), 300.0)

        seeds = [parse_seed("/dnsaddr/seed.example.org"), plain.address]
        node = Node(network, 1, seeds, tmp_path / "1.json", lookup=lookup)
        await start(group, named, plain, node)
        await asyncio.sleep(1)
        assert await connected(node) == {peer(3)}
        assert node.discovery.table() == {
            f"{plain.host.maddr}/p2p/{peer(3)}": "connected",
            "/dnsaddr/seed.example.org": "asking DNS",
        }
        await asyncio.sleep(4)
        (_, row) = node.discovery.rows()
        assert (row.seed, row.state, row.tries) == ("/dnsaddr/seed.example.org", "failed", 1)
        assert "does not exist" in row.reason
        assert "spelling" in row.remedy
        assert "(tried 1 time, again in" in node.discovery.table()["/dnsaddr/seed.example.org"]
        records.append(f"dnsaddr={named.host.maddr}/p2p/{peer(2)}".encode())
        records.append(f"dnsaddr=/memory/99/p2p/{peer(9)}".encode())
        await asyncio.sleep(2 * MAX_BACKOFF_S)
        assert await connected(node) == {peer(2), peer(3)}
        name, one, two = node.discovery.rows()[1:]
        assert (name.state, name.reason) == ("connected", "1 of 2")
        assert one == SeedRow(f"{named.host.maddr}/p2p/{peer(2)}", "connected", via=name.seed)
        assert (two.state, two.via) == ("failed", name.seed)
        assert node.discovery.table()[name.seed] == "connected: 1 of 2"

    run(main)


def test_a_name_of_dead_nodes_says_so(tmp_path: Path) -> None:
    async def main(group: asyncio.TaskGroup) -> None:
        async def lookup(name: str) -> TxtRecords:
            return TxtRecords((f"dnsaddr=/memory/99/p2p/{peer(9)}".encode(),), 300.0)

        seeds = [parse_seed(f"/dnsaddr/seed.example.org/p2p/{peer(9)}")]
        node = Node(MemoryNetwork(), 1, seeds, tmp_path / "1.json", lookup=lookup)
        await start(group, node)
        await asyncio.sleep(60)
        text = node.discovery.table()[f"/dnsaddr/seed.example.org/p2p/{peer(9)}"]
        assert text.startswith("none of 1 answers: nobody answers for")

    run(main)


def test_a_restart_of_our_own_network_is_no_failure_of_others(tmp_path: Path) -> None:
    async def main(group: asyncio.TaskGroup) -> None:
        calls = []

        async def connect(address: PeerAddress, within_s: float = DIAL_S) -> None:
            calls.append(address.peer)
            raise Unreachable("p2pd is not running")

        node = Node(MemoryNetwork(), 1, DEAD[:3], tmp_path / "1.json")
        node.host.connect = connect
        await start(group, node)
        await asyncio.sleep(30)
        assert 20 <= len(calls) <= 200, "tried again soon, but not in a rush"
        assert {known.failures for known in node.discovery.book.all()} == {0}
        assert {row.state for row in node.discovery.rows()} <= {"not tried yet", "dialling"}

    run(main)


def test_a_dial_that_was_none_keeps_the_reason_of_the_last_one(tmp_path: Path) -> None:
    async def main(group: asyncio.TaskGroup) -> None:
        head = f"failed to dial: failed to dial {peer(9)}: all dials failed * [/memory/99]"
        texts = [f"{head} dial tcp4 127.0.0.1:1: connect: connection refused", *[f"{head} dial backoff"] * 3]

        async def connect(address: PeerAddress, within_s: float = DIAL_S) -> None:
            raise Unreachable(texts.pop(0) if texts else f"{head} dial backoff")

        node = Node(MemoryNetwork(), 1, [PeerAddress(peer(9), ("/memory/99",))], tmp_path / "1.json")
        node.host.connect = connect
        await start(group, node)
        await asyncio.sleep(60)
        assert not texts
        (row,) = node.discovery.rows()
        assert (row.reason, row.tries) == ("connection refused", 1)
        assert "no node runs there" in row.remedy

    run(main)


# The same over real p2pd on loopback.


class RealNode(Node):
    """A p2pd with a dial loop."""

    def __init__(self, number: int, seeds: list[PeerAddress], cache: Path, **more):
        listen = ("/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1")
        self.host = P2pdHost(Identity(bytes([number]) * 32), P2pdOptions(listen=listen), poll_s=0.1)
        now = asyncio.get_running_loop().time
        self.discovery = Discovery(self.host, seeds, cache, now=now, rng=random.Random(number), **more)


async def tcp_of(node: Node) -> tuple[str, ...]:
    return tuple(maddr for maddr in await node.host.addresses() if "/tcp/" in maddr)


@pytest.mark.network
def test_over_p2pd_the_cache_replaces_a_dead_seed_and_the_table_says_why(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            seed = RealNode(1, [], tmp_path / "1.json")
            (seeding,) = await start(group, seed)
            at_seed = PeerAddress(seed.host.peer_id, await tcp_of(seed))  # a closed QUIC port is silent for 5 s
            other = RealNode(2, [at_seed], tmp_path / "2.json")
            node = RealNode(3, [at_seed], tmp_path / "3.json")
            tasks = await start(group, other, node)
            node.discovery.learn(other.host.peer_id, await other.host.addresses(), "exchange")

            async def both() -> bool:
                return await connected(node) == {seed.host.peer_id, other.host.peer_id}

            await eventually(both)
            await stopped(tasks[1])
            await stopped(seeding)
            stranger = PeerAddress(Identity(b"?" * 32).peer_id, await tcp_of(other))
            again = RealNode(3, [at_seed, stranger], tmp_path / "3.json")
            tasks[1:] = await start(group, again)

            async def joined() -> bool:
                rows = again.discovery.rows()
                return other.host.peer_id in await connected(again) and {row.state for row in rows} == {"failed"}

            try:
                await eventually(joined)
            except TimeoutError:
                pytest.fail(f"{again.discovery.rows()} {await connected(again)}")
            dead, wrong = again.discovery.rows()
            assert dead.reason == "connection refused"
            assert "no node runs there" in dead.remedy
            assert wrong.reason.startswith("another key answers there")
            assert "new invite" in wrong.remedy
            for task in tasks:
                task.cancel()

    asyncio.run(main())


class HeldBackHost(MemoryHost):
    """Refuses to dial, as go-libp2p does after failures."""

    fresh: list[float]

    async def connect(self, address: PeerAddress, within_s: float = DIAL_S) -> None:
        raise Unreachable("failed to dial: dial backoff")

    async def forget_failures(self) -> None:
        self.fresh.append(asyncio.get_running_loop().time())


def test_a_transport_that_refuses_to_dial_starts_anew_ever_more_rarely(tmp_path):
    async def scenario():
        node = Node(MemoryNetwork(), 1, [PeerAddress(peer(2), ("/memory/2",))], tmp_path / "peers.json")
        node.host.__class__ = HeldBackHost
        node.host.fresh = []
        async with asyncio.TaskGroup() as group:
            ready = asyncio.Event()
            serving = group.create_task(node.serve(ready.set))
            await asyncio.sleep(3600)
            serving.cancel()
        return node.host.fresh

    fresh = run_virtual(scenario())
    gaps = [b - a for a, b in itertools.pairwise(fresh)]
    assert 20 <= fresh[0] < 60
    assert 40 <= gaps[0] < 110
    assert len(fresh) < 12
    assert gaps[-1] >= 600


def test_a_seed_is_told_in_a_few_words() -> None:
    row = SeedRow(f"/ip4/192.0.2.7/tcp/9/p2p/{peer(9)}", "failed", "connection refused", "ask its owner", 6, 9.4)
    assert row_text(row) == "connection refused – ask its owner (tried 6 times, again in 9 s)"
    assert short_text(row) == f"seed …{peer(9)[-6:]}: connection refused (tried 6 times, again in 9 s)"
    assert short_text(SeedRow("/dnsaddr/example.org", "connected")) == "seed /dnsaddr/example.org: connected"


def test_a_seed_with_several_addresses_is_told_once() -> None:
    places = [f"/ip4/192.0.2.7/{kind}/p2p/{peer(9)}" for kind in ("tcp/9", "udp/9/quic-v1", "tcp/10")]
    other = SeedRow(f"/ip4/192.0.2.8/tcp/9/p2p/{peer(8)}", "dialling")
    up = [SeedRow(place, "connected") for place in places[:2]]
    down = SeedRow(places[2], "failed", "connection refused", "", 1, 9.0)
    assert short_texts([*up, down, other]) == [short_text(up[0]), short_text(other)]
    assert short_texts([down, other]) == [short_text(down), short_text(other)]
