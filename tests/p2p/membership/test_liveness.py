"""Silent peers are hung up on within ten seconds, and nobody else is."""

import asyncio
import contextlib
from collections.abc import Callable

from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.membership.liveness import LivenessMonitor
from atoll.p2p.rpc.calls import Calls
from atoll.p2p.transports.memory.memory_network import MemoryNetwork, Quality
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.errors import PeerFault
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId, RunId

RUN = RunId(bytes(32))


async def serve_all(group: asyncio.TaskGroup, network: MemoryNetwork, count: int) -> list[PeerId]:
    """Hosts that know each other; each answers pings."""
    peers = [Identity(bytes([n + 1]) * 32).peer_id for n in range(count)]
    for peer in peers:
        host = network.host(peer)
        calls = Calls(host, RUN)
        up = asyncio.Event()
        group.create_task(host.serve(up.set))
        await up.wait()
        group.create_task(calls.serve())
        world[peer] = (host, calls)
    for peer in peers[1:]:
        await world[peers[0]][0].connect(PeerAddress(peer, (world[peer][0].maddr,)))
        LivenessMonitor(world[peer][1], lambda: (), asyncio.get_running_loop().time, on_fault, lambda p: None)
    return peers


world: dict = {}


def on_fault(peer: PeerId, fault: PeerFault) -> None:
    raise AssertionError((peer, fault))


def silences(cut: Callable[[MemoryNetwork, list[PeerId]], None], count: int, for_s: float) -> dict[PeerId, float]:
    """Peer -> seconds after `cut` when the first host hung up on it."""
    found: dict[PeerId, float] = {}

    async def main() -> None:
        network, loop = MemoryNetwork(latency_s=0.05, silence_s=1e6), asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            peers = await serve_all(group, network, count)
            began = [0.0]
            pulse = LivenessMonitor(
                *(world[peers[0]][1], lambda: [p for p in peers[1:] if p not in found], loop.time, on_fault),
                lambda peer: found.setdefault(peer, loop.time() - began[0]),
            )
            pinging = group.create_task(pulse.serve())
            await asyncio.sleep(60)
            assert not found
            assert all(0.09 <= pulse.rtt_s[peer] < 0.2 for peer in peers[1:])
            began[0] = loop.time()
            cut(network, peers)
            await asyncio.sleep(for_s)
            pinging.cancel()
            raise asyncio.CancelledError

    with contextlib.suppress(asyncio.CancelledError):
        run_virtual(main())
    return found


def test_a_silent_peer_is_given_up_within_ten_seconds():
    found = silences(lambda network, peers: network.cut(peers[:1], peers[1:2]), 4, 60)
    (after_s,) = found.values()
    assert 6.0 <= after_s < 10.0


def test_when_all_fall_silent_together_one_ping_is_enough():
    found = silences(lambda network, peers: network.cut(peers[:1], peers[1:]), 5, 60)
    assert len(found) == 4
    assert min(found.values()) < 6.5


def test_a_slow_peer_is_not_silent():
    def slow(network: MemoryNetwork, peers: list[PeerId]) -> None:
        network.direction(peers[0], peers[1]).quality = Quality(2.0)

    assert silences(slow, 3, 120) == {}


def test_an_answer_that_comes_after_the_connection_leaves_nothing_behind():
    async def main() -> None:
        network, loop = MemoryNetwork(latency_s=0.5, silence_s=1e6), asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            peers = await serve_all(group, network, 2)
            here = peers[1:]
            pulse = LivenessMonitor(world[peers[0]][1], lambda: here, loop.time, on_fault, lambda peer: None)
            pinging = group.create_task(pulse.serve())
            while not pulse.rtt_s:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            await asyncio.sleep(3.0)  # the next ping is on its way
            here = []
            pulse.forget(peers[1])
            await asyncio.sleep(0.8)
            assert loop.time() > 4.0
            await asyncio.sleep(1.0)
            assert not pulse.rtt_s
            pinging.cancel()
            raise asyncio.CancelledError

    with contextlib.suppress(asyncio.CancelledError):
        run_virtual(main())
