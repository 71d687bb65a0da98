"""Direct, punched, relayed: who reaches whom, how fast, and what happens when the way breaks."""

import asyncio
from dataclasses import replace

import pytest

from atoll.p2p.host.framing import read_frame, write_frame
from atoll.p2p.host.interface import HostRestarted, PeerAddress, PeerConnected, PeerDisconnected, Route
from atoll.p2p.nat.relay import RelayLimits
from atoll.protocols.errors import Unreachable
from atoll.protocols.ids import PeerId, RunId, digest
from atoll.protocols.nat import Seen

ROOMY = RelayLimits()


async def seeded(world, first="port-keeping", second="port-keeping", **options) -> None:
    """Seed 1 relays; 2 and 3 are homes that know it."""
    await world.host(1, relay=options.pop("relay", ROOMY))
    await world.host(2, first)
    await world.host(3, second)
    for home in (2, 3):
        await world.meet(home, 1)
    await asyncio.sleep(1)


def test_two_homes_meet_through_one_public_peer(run_world):
    async def scenario(world):
        await seeded(world)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await world.meet(2, 3)
        assert loop.time() - began < 1.0
        await asyncio.sleep(1)
        assert (await world.path(2, 3)).path is (await world.path(3, 2)).path is Route.PUNCHED
        assert await world.say(2, 3, b"hello") == b"hello"
        assert await world.say(3, 2, b"x" * 300_000) == b"x" * 300_000
        assert not world.hosts[1].routes().relay.circuits_served

    run_world(scenario)


def test_a_home_with_another_address_punches_a_peer_that_believes_the_old_connection(run_world):
    async def scenario(world):
        await seeded(world)
        await world.meet(2, 3)
        await asyncio.sleep(40)  # the holes of both routers close
        world.network.living(world.hosts[2].peer_id).disconnected(world.hosts[3].peer_id)
        await asyncio.sleep(0.1)
        assert await world.path(2, 3) is None
        assert (await world.path(3, 2)).path is Route.PUNCHED, "nobody told it"
        loop = asyncio.get_running_loop()
        began = loop.time()
        await world.meet(2, 3)
        assert loop.time() - began < 3.0
        await asyncio.sleep(1)
        assert (await world.path(2, 3)).path is (await world.path(3, 2)).path is Route.PUNCHED
        assert await world.say(3, 2, b"hello") == b"hello"

    run_world(scenario)


def test_a_summons_does_not_break_a_connection_that_answers(run_world):
    async def scenario(world):
        await seeded(world)
        await world.meet(2, 3)
        await asyncio.sleep(1)
        events, second = world.hosts[3].events(), world.hosts[2].peer_id
        world.hosts[3]._dialer.schedule_dial(second, await world.hosts[2].addresses(), is_hole=True)
        await asyncio.sleep(10)
        assert (await world.path(3, 2)).path is Route.PUNCHED
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await anext(events)

    run_world(scenario)


@pytest.mark.parametrize(("first", "second"), [("symmetric", "port-keeping"), ("symmetric", "symmetric")])
def test_where_no_hole_opens_the_relay_carries(run_world, first, second):
    async def scenario(world):
        await seeded(world, first, second)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await world.meet(2, 3)
        assert loop.time() - began < 10.0
        assert (await world.path(2, 3)).path is (await world.path(3, 2)).path is Route.RELAYED
        big = bytes(range(256)) * 4096
        assert await world.say(2, 3, big) == big
        assert await world.say(3, 2, b"back") == b"back"
        assert world.hosts[1].routes().relay.bytes_relayed > 2 * len(big)

    run_world(scenario)


def test_a_public_node_that_does_not_relay_says_so(run_world):
    async def scenario(world):
        await seeded(world, "symmetric", relay=None)
        with pytest.raises(Unreachable, match="relayed"):
            await world.meet(2, 3)

    run_world(scenario)


def test_a_public_node_reaches_a_home_by_reversal(run_world):
    async def scenario(world):
        await seeded(world, "symmetric")
        await world.host(4)
        await world.meet(4, 1)
        await asyncio.sleep(20)  # it learns that it is public
        assert world.hosts[4].routes().reach == "public"
        await world.meet(4, 2)
        await asyncio.sleep(1)
        assert (await world.path(4, 2)).path is Route.DIRECT
        assert await world.say(4, 2, b"hello") == b"hello"

    run_world(scenario)


@pytest.mark.parametrize("asker", [4, 2])
def test_a_public_node_waits_for_a_home_that_lets_no_udp_out(run_world, asker):
    """Where the rendezvous sees the home is the port of its dial by TCP; it dials the public node meanwhile."""

    async def scenario(world):
        await seeded(world, "symmetric")
        await world.host(4)
        await world.meet(4, 1)
        await asyncio.sleep(20)
        rendezvous, home = world.hosts[1]._base, world.hosts[2].peer_id
        listed, dials = rendezvous.connections, []

        async def by_tcp():
            by_tcp = "/ip4/203.0.113.9/tcp/51234"
            return tuple(replace(one, maddr=by_tcp) if one.peer == home else one for one in await listed())

        async def noted(address, within_s):
            dials.append(address.maddrs)

        rendezvous.connections = by_tcp
        world.hosts[4]._base.connect = noted
        there = PeerAddress(world.hosts[6 - asker].peer_id, (f"/p2p/{world.hosts[1].peer_id}/p2p-circuit",))
        await world.hosts[asker].connect(there)
        await asyncio.sleep(1)
        assert (await world.path(4, 2)).path is Route.DIRECT
        assert world.hosts[1].routes().relay.circuits_served == 0, "it was there before a circuit was due"
        assert dials == []

    run_world(scenario)


def test_a_dead_relay_is_replaced_and_events_tell_the_truth(run_world):
    async def scenario(world):
        await seeded(world, "symmetric", "symmetric")
        await world.host(5, relay=ROOMY)
        for home in (2, 3):
            await world.meet(home, 5)
        events, heard = world.hosts[2].events(), []

        gone_again = asyncio.Event()
        third = world.hosts[3].peer_id

        async def listen():
            async for event in events:
                heard.append(event)
                if event == PeerDisconnected(third):
                    gone_again.set()

        listener = world.group.create_task(listen())
        await world.meet(2, 3)
        relay = next(n for n in (1, 5) if world.hosts[n].routes().relay.circuits)
        loop = asyncio.get_running_loop()
        gone = loop.time()
        await world.kill(relay)
        await gone_again.wait()
        await world.meet(2, 3)
        assert loop.time() - gone < 15.0
        assert await world.say(2, 3, b"again") == b"again"
        assert [type(e) for e in heard if e.peer == third] == [PeerConnected, PeerDisconnected, PeerConnected]
        listener.cancel()

    run_world(scenario)


def test_a_relayed_connection_becomes_direct_when_a_hole_opens(run_world):
    async def scenario(world):
        await seeded(world, "symmetric", "port-keeping")
        await world.meet(2, 3)
        stream = await world.hosts[2].open_stream(world.hosts[3].peer_id, "/test/echo/1")
        await asyncio.sleep(5)  # the first punches are over
        world.network.put_behind(world.hosts[2].peer_id, "port-keeping")  # the laptop moved to another network
        for _ in range(600):
            await asyncio.sleep(1)
            await write_frame(stream, b"in use")
            await read_frame(stream, 100)
            if (await world.path(2, 3)).path is Route.PUNCHED:
                break
        assert (await world.path(3, 2)).path is Route.PUNCHED
        served = world.hosts[1].routes().relay.circuits_served
        assert await world.say(2, 3, b"hello") == b"hello"
        assert world.hosts[1].routes().relay.circuits_served == served
        await asyncio.sleep(10)
        await write_frame(stream, b"an old stream goes on")
        assert await read_frame(stream, 100) == b"an old stream goes on"
        await asyncio.sleep(20)
        assert world.hosts[1].routes().relay.circuits == 0  # the old stream had its grace
        with pytest.raises(Unreachable):
            await stream.read_exactly(1)

    run_world(scenario)


def test_relay_only_never_dials_and_never_tells_where_it_is(run_world):
    async def scenario(world):
        await world.host(1, relay=ROOMY)
        await world.host(2, relay_only=True, trusted=(1,))
        await world.host(3)
        for other in (2, 3):
            await world.meet(other, 1)
        assert all("p2p-circuit" in maddr for maddr in await world.hosts[2].addresses())
        await world.meet(2, 3)
        await asyncio.sleep(60)
        assert (await world.path(2, 3)).path is Route.RELAYED
        await world.hosts[2].disconnect(world.hosts[3].peer_id)
        await asyncio.sleep(10)
        await world.meet(3, 2)
        assert (await world.path(3, 2)).path is Route.RELAYED
        assert world.hosts[2].routes().reach == "relay-only"

    run_world(scenario)


def test_a_host_that_many_see_by_tcp_is_shown_once(run_world):
    async def scenario(world):
        host = await world.host(1)
        for number in range(16):
            seen = Seen((f"/ip4/203.0.113.9/tcp/{50_000 + number}",), "public", relays=False, unix_s=0.0)
            host.survey.observations[PeerId(f"observer {number}")] = seen
        assert host.routes().observed == ("/ip4/203.0.113.9/tcp/50000",)

    run_world(scenario)


def test_reach_is_known_within_ten_seconds(run_world):
    async def scenario(world):
        await world.host(1)
        await world.host(2, "port-keeping")
        assert world.hosts[2].routes().reach == "unknown"
        await world.meet(2, 1)
        await asyncio.sleep(10)
        assert world.hosts[1].routes().reach == "public"
        assert "/memory/1" in world.hosts[1].routes().why

    run_world(scenario)


def test_caps_of_the_relay_hold(run_world):
    async def scenario(world):
        limits = RelayLimits(circuits_per_peer=3, bytes_per_day=400_000, rate_bytes_s=100_000)
        await seeded(world, "symmetric", "symmetric", relay=limits)
        await world.meet(2, 3)
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert len(await world.say(2, 3, bytes(100_000))) == 100_000
        assert loop.time() - began > 200_000 / 100_000
        streams = [await world.hosts[2].open_stream(world.hosts[3].peer_id, "/test/echo/1") for _ in range(2)]
        with pytest.raises(Unreachable, match="too many circuits"):
            await world.say(2, 3, b"")
        for stream in streams:
            stream.reset()
        await asyncio.sleep(1)
        with pytest.raises(Unreachable):
            await world.say(2, 3, bytes(400_000))
        assert world.hosts[1].routes().relay.bytes_today <= 400_000 + 70_000
        with pytest.raises(Unreachable):
            await world.meet(2, 3)
        await asyncio.sleep(90_000)  # another day
        await world.meet(2, 1), await world.meet(3, 1)
        await world.meet(2, 3)

    run_world(scenario)


def test_strangers_of_another_run_get_nothing(run_world):
    async def scenario(world):
        await seeded(world, "symmetric", "symmetric")
        await world.host(6, run=RunId(digest(b"another")))
        await world.meet(6, 1)
        with pytest.raises(Unreachable):
            await world.hosts[6].connect(
                PeerAddress(world.hosts[3].peer_id, (f"/memory/1/p2p/{world.hosts[1].peer_id}/p2p-circuit",))
            )
        assert not world.faults

    run_world(scenario)


def test_a_transport_that_dies_takes_all_connections_with_it_and_they_come_back(run_world):
    async def scenario(world):
        await seeded(world, "symmetric", "symmetric")
        await world.meet(2, 3)
        host, events = world.hosts[2], world.hosts[2].events()
        world.network.kill(host.peer_id)
        await asyncio.sleep(8)
        assert not await host.connections()
        with pytest.raises(Unreachable):
            await host.open_stream(world.hosts[3].peer_id, "/test/echo/1")
        assert await world.path(3, 2) is None
        world.network.revive(host.peer_id)
        await asyncio.sleep(1)
        heard = [type(event) for event in events._events]
        assert heard == [PeerDisconnected, PeerDisconnected, HostRestarted]
        await world.meet(2, 1)
        await world.meet(2, 3)
        assert await world.say(2, 3, b"again") == b"again"

    run_world(scenario)
