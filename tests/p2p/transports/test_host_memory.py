"""What only the simulated network promises: time, partitions, determinism."""

import asyncio
import random

import pytest

from atoll.p2p.host.interface import PeerAddress, PeerConnected, PeerDisconnected
from atoll.p2p.transports.host_base import (
    CALLS_APART,
    CALLS_APART_IN_ALL,
    STREAMS_IN_ALL,
    STREAMS_PER_PEER,
    Admission,
)
from atoll.p2p.transports.memory.memory_network import MemoryNetwork, Quality
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols import wires
from atoll.protocols.errors import Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId

PEERS = [Identity(bytes([number + 1]) * 32).peer_id for number in range(8)]


async def echo(stream):
    while True:
        await stream.write(await stream.read_exactly(4))


async def sink(stream):
    size = int.from_bytes(await stream.read_exactly(4), "little")
    for _ in range(0, size, 250_000):
        await stream.read_exactly(250_000)
    await stream.write(b"ok")


def simulate(network, count, scenario):
    """Run `scenario(hosts)` in a network of `count` serving hosts."""

    async def main():
        hosts = [network.host(peer) for peer in PEERS[:count]]
        async with asyncio.TaskGroup() as group:
            tasks = []
            for host in hosts:
                host.set_handler("/echo", echo)
                host.set_handler("/sink", sink)
                tasks.append(group.create_task(host.serve(lambda: None)))
            await asyncio.sleep(0)
            try:
                return await scenario(hosts)
            finally:
                for task in tasks:
                    task.cancel()

    return run_virtual(main())


CALLS, BLOBS = wires.CALLS.protocol(1), wires.BLOB.protocol()


def test_one_peer_has_so_many_streams_and_leaves_room_for_others():
    admission = Admission()
    entered = [admission.enter(PEERS[0], BLOBS) for _ in range(STREAMS_PER_PEER + 2)]
    assert entered == [True] * STREAMS_PER_PEER + [False] * 2
    assert admission.enter(PEERS[1], BLOBS)
    admission.leave(PEERS[0], BLOBS)
    assert [admission.enter(PEERS[0], BLOBS) for _ in range(2)] == [True, False]


def test_all_peers_together_have_so_many_streams():
    admission, most = Admission(), STREAMS_IN_ALL - CALLS_APART_IN_ALL
    assert all(admission.enter(PeerId(f"p{number}"), BLOBS) for number in range(most))
    assert not admission.enter(PEERS[0], BLOBS)
    assert all(admission.enter(PeerId(f"p{number}"), CALLS) for number in range(CALLS_APART_IN_ALL))
    assert not admission.enter(PEERS[0], CALLS)
    admission.leave(PeerId("p0"), BLOBS)
    assert admission.enter(PEERS[0], CALLS), "more peers than have calls apart share what is left"
    admission.leave(PEERS[0], CALLS)
    assert admission.enter(PEERS[0], BLOBS)


@pytest.mark.parametrize("protocol", [CALLS, BLOBS])
@pytest.mark.parametrize("flooders", [33, 190])
def test_peers_that_take_all_they_get_leave_room_for_the_first_streams_of_others(flooders, protocol):
    admission = Admission()
    for number in range(flooders):
        while admission.enter(PeerId(f"p{number}"), protocol):
            pass
    assert all(admission.enter(peer, BLOBS) for peer in PEERS[:2] for _ in range(2))


@pytest.mark.parametrize("flooders", [1, 33, 190])
def test_a_peer_that_has_all_its_other_streams_gets_its_stream_of_calls(flooders):
    """A stream of calls that broke came back as a third one, and was refused, so its pings failed."""
    admission = Admission()
    for number in range(flooders):
        for protocol in (CALLS, BLOBS):
            while admission.enter(PeerId(f"p{number}"), protocol):
                pass
    while admission.enter(PEERS[0], BLOBS):
        pass
    for _ in range(3):
        assert [admission.enter(PEERS[0], CALLS) for _ in range(CALLS_APART)] == [True] * CALLS_APART
        for _ in range(CALLS_APART):
            admission.leave(PEERS[0], CALLS)


def test_streams_that_leave_leave_nothing():
    admission = Admission()
    entered = [protocol for protocol in 3 * [CALLS, CALLS, BLOBS] if admission.enter(PEERS[0], protocol)]
    assert len(entered) == 9
    for protocol in entered:
        admission.leave(PEERS[0], protocol)
    assert vars(admission) == vars(Admission())


def now_s():
    return asyncio.get_running_loop().time()


async def linked(a, b, protocol="/echo"):
    await a.connect(PeerAddress(b.peer_id, await b.addresses()))
    return await a.open_stream(b.peer_id, protocol)


async def ping(stream):
    start_s = now_s()
    await stream.write(b"ping")
    await stream.read_exactly(4)
    return now_s() - start_s


def test_latency_is_the_round_trip():
    async def scenario(hosts):
        start_s = now_s()
        stream = await linked(*hosts)
        return now_s() - start_s, await ping(stream)

    opened_s, ping_s = simulate(MemoryNetwork(latency_s=0.05), 2, scenario)
    assert opened_s == pytest.approx(0.2)  # a round trip to connect, one to open
    assert ping_s == pytest.approx(0.1)


def test_bandwidth_is_shared_by_the_streams_of_a_link():
    async def scenario(hosts):
        a, b = hosts
        await a.connect(PeerAddress(b.peer_id, await b.addresses()))
        start_s, size = now_s(), 5_000_000

        async def one():
            stream = await a.open_stream(b.peer_id, "/sink")
            await stream.write(size.to_bytes(4, "little") + bytes(size))
            await stream.read_exactly(2)
            return now_s() - start_s

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one()) for _ in range(2)]
        return [task.result() for task in tasks]

    first_s, second_s = simulate(MemoryNetwork(bandwidth_bps=80e6), 2, scenario)
    assert first_s == pytest.approx(1.0, rel=0.15)  # 10 MB at 10 MB/s, both end together
    assert second_s == pytest.approx(1.0, rel=0.02)


def test_links_differ():
    async def scenario(hosts):
        near, far = await linked(hosts[0], hosts[1]), await linked(hosts[0], hosts[2])
        return await ping(near), await ping(far)

    network = MemoryNetwork(latency_s=0.01)
    network.set_link(PEERS[0], PEERS[2], Quality(latency_s=0.2))
    near_s, far_s = simulate(network, 3, scenario)
    assert (near_s, far_s) == (pytest.approx(0.02), pytest.approx(0.4))


def test_loss_delays_but_keeps_order_and_bytes():
    async def scenario(hosts):
        stream = await linked(*hosts)
        sent = b"".join(number.to_bytes(4, "little") for number in range(500))
        for start in range(0, len(sent), 4):
            await stream.write(sent[start : start + 4])
        return await stream.read_exactly(len(sent)) == sent, now_s()

    same, lossy_s = simulate(MemoryNetwork(latency_s=0.01, loss=0.1), 2, scenario)
    assert same
    assert lossy_s > 0.1
    assert simulate(MemoryNetwork(latency_s=0.01), 2, scenario) == (True, pytest.approx(0.06))


def test_a_short_partition_only_delays():
    async def scenario(hosts):
        stream = await linked(*hosts)
        network.cut([PEERS[0]], [PEERS[1]])
        asyncio.get_running_loop().call_later(5, network.heal)
        waited_s = await ping(stream)
        await asyncio.sleep(30)
        return waited_s, await ping(stream)

    network = MemoryNetwork(latency_s=0.01)
    assert simulate(network, 2, scenario) == (pytest.approx(5.01), pytest.approx(0.02))


def test_a_dial_into_a_cut_gets_through_at_a_retransmission():
    """As TCP's does: after 1, 3, 7 s. So a dial that hangs at the heal takes some seconds more."""

    async def scenario(hosts):
        a, b = hosts
        network.cut([a.peer_id], [b.peer_id])
        asyncio.get_running_loop().call_later(3.5, network.heal)
        await a.connect(PeerAddress(b.peer_id, (b.maddr,)))
        return now_s()

    network = MemoryNetwork(latency_s=0.01)
    assert simulate(network, 2, scenario) == pytest.approx(7.02)


def test_a_long_partition_breaks_connections_and_heals():
    async def scenario(hosts):
        a, b, c = hosts
        stream, other = await linked(a, b), await linked(a, c)
        events = b.events()
        network.cut([a.peer_id, c.peer_id], [b.peer_id])
        start_s = now_s()
        await stream.write(b"ping")
        with pytest.raises(Unreachable):
            await stream.read_exactly(4)
        assert now_s() - start_s == pytest.approx(15)
        assert await ping(other) < 0.1
        assert await anext(events) == PeerDisconnected(a.peer_id)
        start_s = now_s()
        with pytest.raises(Unreachable):
            await linked(a, b)
        assert now_s() - start_s == pytest.approx(15)
        network.heal()
        assert await ping(await linked(a, b)) < 0.1
        assert await anext(events) == PeerConnected(a.peer_id)

    network = MemoryNetwork(latency_s=0.01)
    simulate(network, 3, scenario)


def test_a_new_process_takes_the_place_of_a_dead_one():
    async def main():
        network = MemoryNetwork(latency_s=0.01)
        async with asyncio.TaskGroup() as group:
            a, b = (network.host(peer) for peer in PEERS[:2])
            tasks = [group.create_task(host.serve(lambda: None)) for host in (a, b)]
            await asyncio.sleep(0)
            where = PeerAddress(b.peer_id, await b.addresses())
            await a.connect(where)
            tasks[1].cancel()
            await asyncio.wait(tasks[1:])
            await asyncio.sleep(1)
            assert await a.connections() == ()
            with pytest.raises(Unreachable):
                await a.connect(where)
            b = network.host(b.peer_id)
            b.set_handler("/echo", echo)
            tasks.append(group.create_task(b.serve(lambda: None)))
            await asyncio.sleep(0)
            await a.connect(where)
            assert await ping(await a.open_stream(b.peer_id, "/echo")) == pytest.approx(0.02)
            for task in tasks:
                task.cancel()

    run_virtual(main())


def test_two_runs_are_the_same_to_the_microsecond():
    def run(seed):
        network = MemoryNetwork(seed, latency_s=0.03, bandwidth_bps=1e6, loss=0.2)

        async def scenario(hosts):
            trace = []
            luck = random.Random(seed)

            async def talk(a, b):
                stream = await linked(a, b)
                for _ in range(20):
                    await asyncio.sleep(luck.random())
                    trace.append((now_s(), a.peer_id, await ping(stream)))

            async with asyncio.TaskGroup() as group:
                for a in hosts:
                    for b in hosts:
                        if a is not b:
                            group.create_task(talk(a, b))
            return trace

        return simulate(network, 5, scenario)

    assert run(1) == run(1)
    assert run(1) != run(2)
