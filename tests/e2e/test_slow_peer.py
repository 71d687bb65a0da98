"""A peer that sends, reads and answers a byte a second against two real nodes, with the shipped deadlines."""

import asyncio
import time

import psutil
import pytest

from atoll.p2p.blobs.server import IDLE_S
from atoll.p2p.host.framing import PART_S
from atoll.protocols.ids import Digest, RunId
from atoll.protocols.wires import REDUCTION
from tests.e2e.conftest import stop_all
from tests.e2e.hostile_peer import beside_us
from tests.p2p.swarm.slow_peer import SlowPeer

pytestmark = pytest.mark.swarm

COPIES = 4
"""Streams of each kind, to each of the nodes."""
LASTS_S = 2 * max(PART_S, IDLE_S)
FEW_DESCRIPTORS = 60
"""More than before, at most: of 8 kinds of streams 4 each, a Unix socket for each, and what p2pd needs."""
MORE_BYTES = 64 << 20


def memory(node) -> int:
    return psutil.Process(node.process.pid).memory_info().rss


@pytest.mark.slow(
    slice="tests/p2p/swarm/test_slow_peer.py::test_each_of_its_streams_ends_and_the_honest_are_served"
)
def test_a_slow_peer_stops_no_round(nodes, until, capsys):
    owner, second = nodes("owner"), nodes("second")
    run = owner.new_run("--data", "synthetic:markov", "--set", "pace.min_members=2")
    owner.start("--run", "tiny").up()
    second.start("--run", str(run), "--seed", owner.seed()).up()
    until("rounds are final", lambda: min(owner.final(), second.final()) >= 4)
    name = RunId(bytes.fromhex(owner.status()["run"]))
    opened = []

    async def serve(host, victims):
        slow = SlowPeer(host, name, 1.0)
        opened.append(slow.opened)
        kinds = slow.kinds(Digest(bytes(32)), REDUCTION.protocol())
        async with asyncio.TaskGroup() as group:
            up = asyncio.Event()
            group.create_task(host.serve(up.set))
            await up.wait()
            for victim in victims * COPIES:
                group.create_task(slow.attack(victim, kinds))

    before = psutil.Process(owner.process.pid).num_fds(), memory(owner)
    began, first = time.monotonic(), owner.final()
    most_fds = most_bytes = 0
    with beside_us(serve, [owner.seed(), second.seed()]):
        while time.monotonic() - began < LASTS_S:
            owner.goes_on(1)
            most_fds = max(most_fds, psutil.Process(owner.process.pid).num_fds())
            most_bytes = max(most_bytes, memory(owner))
        until("the peer had its turns", lambda: opened and min(opened[0].values()) > COPIES)
    with capsys.disabled():
        print(f"\n{owner.final() - first} rounds in {time.monotonic() - began:.0f} s; streams {dict(opened[0])}")
        print(f"descriptors {before[0]} -> {most_fds}, bytes {before[1]} -> {most_bytes}")
    assert most_fds <= before[0] + FEW_DESCRIPTORS
    assert most_bytes <= before[1] + MORE_BYTES
    assert owner.status()["peers"] >= 1
    stop_all(owner, second)
