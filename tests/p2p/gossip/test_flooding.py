"""A flood reaches everybody, each message once; floods of junk and of volume stay bounded."""

import asyncio
import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from atoll.p2p.gossip.flooding import MESSAGES_BURST, SEEN_IDS, Gossip, choose_peers
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
    """A host that gossips on one topic."""

    def __init__(self, network: MemoryNetwork, number: int) -> None:
        self.host: MemoryHost = network.host(Identity(bytes([number + 1]) * 32).peer_id)
        self.neighbours: set[PeerId] = set()
        self.heard: Counter[bytes] = Counter()
        self.faults: Counter[PeerId] = Counter()
        self.calls = Calls(self.host, RUN, on_fault=self._blame)
        now = asyncio.get_running_loop().time
        self.gossip = Gossip(self.calls, lambda: self.neighbours, now, random.Random(number))
        self.gossip.subscribe("topic", self._accept, max_bytes=1000)

    def _accept(self, sender: PeerId, data: bytes) -> bool:
        if data.startswith(b"bad"):
            raise DecodeError("bad")
        self.heard[data] += 1
        return True

    def _blame(self, peer: PeerId, fault: PeerFault) -> None:
        self.faults[peer] += 1


async def start(group: asyncio.TaskGroup, count: int, links: list[tuple[int, int]]) -> list[Node]:
    network = MemoryNetwork(seed=1, latency_s=0.01)
    nodes = [Node(network, number) for number in range(count)]
    for node in nodes:
        ready = asyncio.Event()
        group.create_task(node.host.serve(ready.set))
        group.create_task(node.calls.serve())
        await ready.wait()
    for a, b in links:
        await nodes[a].host.connect(PeerAddress(nodes[b].host.peer_id, (nodes[b].host.maddr,)))
        nodes[a].neighbours.add(nodes[b].host.peer_id)
        nodes[b].neighbours.add(nodes[a].host.peer_id)
    await asyncio.sleep(1)
    return nodes


class Over(Exception):
    """Ends a task group."""


def test_a_flood_reaches_all_once_along_any_graph() -> None:
    ring = [(number, (number + 1) % 12) for number in range(12)]
    chords = [(number, (number + 5) % 12) for number in range(12)]

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            nodes = await start(group, 12, ring + chords)
            for number in range(20):
                nodes[number % 12].gossip.publish("topic", b"news %d" % number)
            await asyncio.sleep(5)
            for number, node in enumerate(nodes):
                assert len(node.heard) == sum(1 for news in range(20) if news % 12 != number)
                assert set(node.heard.values()) == {1}
                assert not node.faults
            statistics = [node.gossip.statistics() for node in nodes]
            assert sum(row.forwarded for row in statistics) == 20 * 11
            raise Over

    with_group(main)


def test_illegal_messages_are_blamed_and_not_passed_on() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            a, b, c = await start(group, 3, [(0, 1), (1, 2)])
            a.calls.notify(b.host.peer_id, "gossip.topic", b"bad 1")
            a.calls.notify(b.host.peer_id, "gossip.topic", b"x" * 2000)
            await asyncio.sleep(1)
            assert b.faults == {a.host.peer_id: 2}
            assert not b.heard
            assert not c.heard
            assert not c.faults
            raise Over

    with_group(main)


def test_a_flood_of_volume_is_cut_without_blame_and_recovers() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            a, b = await start(group, 2, [(0, 1)])
            for number in range(int(MESSAGES_BURST) + 1000):
                a.calls.notify(b.host.peer_id, "gossip.topic", b"%d" % number)
                if number % 100 == 0:
                    await asyncio.sleep(0.02)
            await asyncio.sleep(0.1)
            assert b.gossip.statistics().over_rate > 0
            assert not b.faults
            await asyncio.sleep(60)
            heard = len(b.heard)
            a.gossip.publish("topic", b"later")
            await asyncio.sleep(1)
            assert len(b.heard) == heard + 1
            raise Over

    with_group(main)


def test_the_memory_of_messages_is_bounded() -> None:
    async def main() -> None:
        node = Node(MemoryNetwork(), 1)
        for number in range(SEEN_IDS + 100):
            node.gossip.publish("topic", number.to_bytes(4, "big"))
        assert len(node.gossip._seen) == SEEN_IDS

    run_virtual(main())


def with_group(main) -> None:
    try:
        run_virtual(main())
    except* Over:
        pass


PEERS = [PeerId(f"peer{number:02}") for number in range(30)]


@given(st.sets(st.sampled_from(PEERS)), st.sampled_from([*PEERS, None]), st.integers(1, 12), st.integers())
def test_the_chosen_are_distinct_neighbours_but_the_sender(
    neighbours: set[PeerId], sender: PeerId | None, fanout: int, seed: int
) -> None:
    chosen = choose_peers(neighbours, sender, fanout, random.Random(seed))
    others = neighbours - {sender}
    assert len(chosen) == len(set(chosen)) == min(fanout, len(others))
    assert set(chosen) <= others
    assert chosen == choose_peers(neighbours, sender, fanout, random.Random(seed)), "chance is seeded"


@given(st.lists(st.floats(0, 10), max_size=200))
def test_a_bucket_never_gives_more_than_its_rate_and_burst(pauses: list[float]) -> None:
    bucket, now, taken = Bucket(2.0, 5.0, 0.0), 0.0, 0
    for pause in pauses:
        now += pause
        taken += bucket.take(1, now)
    assert taken <= 5 + 2 * now + 1e-6
