"""Gossip over real calls: it reaches everybody, each message once; junk and volume do no harm."""

import asyncio
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.p2p.gossip import gossip as gossip_module
from atoll.p2p.gossip.gossip import MESSAGES_BURST, Gossip
from atoll.p2p.gossip.push_trees import ANNOUNCE_S, IDS_MAX, KNOWN, KNOWN_S, WAIT_S, Ids, PushTrees
from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.limits.token_bucket import Bucket
from atoll.p2p.rpc.calls import Calls
from atoll.p2p.transports.memory.memory_network import MemoryHost, MemoryNetwork
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.errors import DecodeError, PeerFault
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId, RunId, digest

RUN = RunId(digest(b"run"))


class Node:
    """A host that gossips on one topic. The text before `:` is a message's author."""

    def __init__(self, network: MemoryNetwork, number: int) -> None:
        self.host: MemoryHost = network.host(Identity(bytes([number + 1]) * 32).peer_id)
        self.neighbours: set[PeerId] = set()
        self.heard: Counter[bytes] = Counter()
        self.copies = 0
        self.faults: Counter[PeerId] = Counter()
        self.calls = Calls(self.host, RUN, on_fault=self._blame)
        now = asyncio.get_running_loop().time
        luck = random.Random(number)
        self.gossip = Gossip(self.host.peer_id, self.calls, lambda: self.neighbours, now, luck)
        self.gossip.subscribe("topic", self._accept, max_bytes=1000)
        receive, self.gossip._receive = self.gossip._receive, self._count
        self._real = receive

    def publish(self, text: bytes) -> bytes:
        data = self.host.peer_id.encode() + b":" + text
        self.gossip.publish("topic", data, self.host.peer_id)
        return data

    def _count(self, *words) -> None:
        self.copies += 1
        self._real(*words)

    def _accept(self, sender: PeerId, data: bytes) -> PeerId | None:
        if data.startswith(b"bad"):
            raise DecodeError("bad")
        self.heard[data] += 1
        return PeerId(data.partition(b":")[0].decode())

    def _blame(self, peer: PeerId, fault: PeerFault) -> None:
        self.faults[peer] += 1


async def start(
    group: asyncio.TaskGroup,
    count: int,
    links: list[tuple[int, int]],
    network: MemoryNetwork | None = None,
) -> list[Node]:
    network = network or MemoryNetwork(seed=1, latency_s=0.01)
    nodes = [Node(network, number) for number in range(count)]
    for node in nodes:
        ready = asyncio.Event()
        group.create_task(node.host.serve(ready.set))
        group.create_task(node.calls.serve())
        await ready.wait()
    for a, b in links:
        await connect(nodes[a], nodes[b])
    await asyncio.sleep(1)
    return nodes


async def connect(a: Node, b: Node) -> None:
    await a.host.connect(PeerAddress(b.host.peer_id, (b.host.maddr,)))
    a.neighbours.add(b.host.peer_id)
    b.neighbours.add(a.host.peer_id)


async def disconnect(a: Node, b: Node) -> None:
    await a.host.disconnect(b.host.peer_id)
    for one, other in ((a, b), (b, a)):
        one.neighbours.discard(other.host.peer_id)
        one.gossip.forget(other.host.peer_id)


class Over(Exception):
    """Ends a task group."""


RING = [(number, (number + 1) % 12) for number in range(12)]
CHORDS = [(number, (number + 5) % 12) for number in range(12)]


def test_a_message_reaches_all_once_along_any_graph() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            nodes = await start(group, 12, RING + CHORDS)
            for number in range(20):
                nodes[number % 12].publish(b"news %d" % number)
            await asyncio.sleep(5)
            for number, node in enumerate(nodes):
                assert len(node.heard) == sum(1 for news in range(20) if news % 12 != number)
                assert set(node.heard.values()) == {1}
                assert not node.faults
            raise Over

    with_group(main)


def test_every_message_arrives_while_connections_break_and_parts_are_lost() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            network = MemoryNetwork(seed=3, latency_s=0.03, bandwidth_bps=1e6, loss=0.05)
            nodes = await start(group, 12, RING + CHORDS, network)
            luck, published = random.Random(1), []
            for number in range(60):
                published.append(luck.choice(nodes).publish(b"news %d" % number))
                if number % 6 == 3:
                    a, b = (nodes[at] for at in CHORDS[number // 6])
                    await disconnect(a, b)
                    await asyncio.sleep(luck.random())
                    await connect(a, b)
                await asyncio.sleep(luck.random())
            await asyncio.sleep(20)
            for node in nodes:
                own = node.host.peer_id.encode()
                assert set(node.heard) == {data for data in published if not data.startswith(own)}
                assert not node.faults
            raise Over

    with_group(main)


def test_sixteen_that_know_each_other_receive_each_message_about_twice() -> None:
    """Of the records of sixteen whole nodes: tests/node/virtual/test_virtual_gossip.py."""

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            nodes = await start(group, 16, [(a, b) for b in range(16) for a in range(b)])
            for number in range(20):
                for node in nodes:
                    node.publish(b"news %d" % number)
                await asyncio.sleep(1)
            assert all(len(node.heard) == 20 * 15 for node in nodes)
            assert sum(node.copies for node in nodes) / (20 * 16 * 15) <= 2.5
            raise Over

    with_group(main)


def test_what_is_announced_is_fetched_and_what_is_asked_for_is_sent() -> None:
    """A newcomer to whom nobody pushes: its neighbour was told that it does not want the author's messages."""

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            a, b = await start(group, 2, [(0, 1)])
            first = a.publish(b"first")
            await asyncio.sleep(0.1)
            prune = Ids(prune=gossip_module._name("topic", first))
            b.calls.notify(a.host.peer_id, "gossip.ids", prune)
            await asyncio.sleep(0.1)
            second = a.publish(b"second")
            await asyncio.sleep(ANNOUNCE_S)
            assert second not in b.heard
            await asyncio.sleep(WAIT_S + 0.1)
            assert b.heard[second] == 1
            third = a.publish(b"third")
            await asyncio.sleep(0.1)
            assert b.heard[third] == 1, "from now on it is pushed to again"
            raise Over

    with_group(main)


def test_illegal_messages_are_blamed_and_not_passed_on() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            a, b, c = await start(group, 3, [(0, 1), (1, 2)])
            a.calls.notify(b.host.peer_id, "gossip.topic", b"bad 1")
            a.calls.notify(b.host.peer_id, "gossip.topic", b"x" * 2000)
            a.calls.notify(b.host.peer_id, "gossip.ids", (bytes(7), b"", b""))
            a.calls.notify(b.host.peer_id, "gossip.ids", (bytes(1 << 16), b"", b""))
            await asyncio.sleep(3)
            assert b.faults == {a.host.peer_id: 4}
            assert not b.heard
            assert not c.copies
            assert not c.faults
            raise Over

    with_group(main)


def test_a_flood_of_volume_is_cut_without_blame_and_recovers() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            a, b = await start(group, 2, [(0, 1)])
            for number in range(int(MESSAGES_BURST) + 1000):
                a.calls.notify(b.host.peer_id, "gossip.topic", b"%d:" % number)
                if number % 100 == 0:
                    await asyncio.sleep(0.02)
            await asyncio.sleep(0.1)
            assert len(b.heard) < MESSAGES_BURST + 500
            assert not b.faults
            await asyncio.sleep(60)
            heard = len(b.heard)
            a.publish(b"later")
            await asyncio.sleep(1)
            assert len(b.heard) == heard + 1
            raise Over

    with_group(main)


def test_notices_of_ids_are_within_the_rate_and_of_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Ids] = []
    monkeypatch.setattr(PushTrees, "hear", lambda self, sender, ids, now: heard.append(ids) or [])

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            a, b = await start(group, 2, [(0, 1)])
            for number in range(2 * int(MESSAGES_BURST)):
                a.calls.notify(b.host.peer_id, "gossip.ids", Ids(have=number.to_bytes(8, "big")))
                if number % 100 == 0:
                    await asyncio.sleep(0.02)
            await asyncio.sleep(1)
            assert MESSAGES_BURST <= len(heard) < MESSAGES_BURST * 1.3
            await asyncio.sleep(60)
            heard.clear()
            for _ in range(200):
                a.calls.notify(b.host.peer_id, "gossip.ids", Ids(have=bytes(8 * IDS_MAX)))
                await asyncio.sleep(0.02)
            assert 100 < len(heard) < 170, "long lists count for more"
            await asyncio.sleep(60)
            b.neighbours.clear()
            heard.clear()
            a.calls.notify(b.host.peer_id, "gossip.ids", Ids(have=bytes(8)))
            await asyncio.sleep(1)
            assert not heard, "it is no neighbour any more"
            raise Over

    with_group(main)


def test_the_memory_of_messages_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossip_module, "RECENT_BYTES", 50_000)

    async def main() -> None:
        node = Node(MemoryNetwork(), 1)
        for number in range(KNOWN + 100):
            node.publish(number.to_bytes(4, "big"))
        assert len(node.gossip._trees.known) == KNOWN
        held = sum(len(data) for _, data in node.gossip._recent.values())
        assert 49_000 < held == node.gossip._recent_bytes <= 50_000

    run_virtual(main())


def test_messages_are_remembered_for_a_time_and_then_take_no_memory() -> None:
    async def main() -> None:
        node = Node(MemoryNetwork(), 1)
        for number in range(100):
            node.publish(number.to_bytes(4, "big"))
        await asyncio.sleep(KNOWN_S - 1)
        last = node.publish(b"later")
        assert len(node.gossip._trees.known) == len(node.gossip._recent) == 101
        await asyncio.sleep(2)
        newest = node.publish(b"newest")
        assert len(node.gossip._trees.known) == 2
        assert [data for _, data in node.gossip._recent.values()] == [last, newest]
        assert node.gossip._recent_bytes == len(last) + len(newest)

    run_virtual(main())


def with_group(main) -> None:
    try:
        run_virtual(main())
    except* Over:
        pass


@given(st.lists(st.floats(0, 10), max_size=200))
def test_a_bucket_never_gives_more_than_its_rate_and_burst(pauses: list[float]) -> None:
    bucket, now, taken = Bucket(2.0, 5.0, 0.0), 0.0, 0
    for pause in pauses:
        now += pause
        taken += bucket.take(1, now)
    assert taken <= 5 + 2 * now + 1e-6
