"""Peers, relays and rendezvous that lie, flood, or send nonsense: nobody dies, nobody is led anywhere."""

import asyncio
import contextlib
import math
from dataclasses import replace

import pytest

from atoll.p2p.host.framing import read_frame, write_frame
from atoll.p2p.host.interface import PeerAddress, PeerDisconnected
from atoll.p2p.nat.circuit import handshake, open_circuit, prover
from atoll.p2p.nat.held_circuits import HOLD_PROTOCOL
from atoll.p2p.nat.nat_protocol import PROTOCOL, request
from atoll.p2p.nat.reachability import is_global
from atoll.p2p.nat.relay import CIRCUIT_PROTOCOL, RELAY_PROTOCOL, RelayLimits
from atoll.p2p.nat.route_dialer import SUMMONS_AT_ONCE
from atoll.protocols import codec
from atoll.protocols.errors import Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.nat import (
    NAT_MAX_BYTES,
    Coming,
    DialBack,
    Incoming,
    Look,
    NatRefused,
    OpenCircuit,
    Reached,
    Seen,
    Summons,
    decode_ask,
    decode_opening,
    sign_punch,
)

ECHO = "/test/echo/1"


def answering(answer):
    """A handler of the NAT wire: `answer(ask)` is what it says."""

    async def handle(stream):
        question = decode_ask(await read_frame(stream, NAT_MAX_BYTES))
        await write_frame(stream, codec.encode(answer(question)))

    return {PROTOCOL: handle}


def liar(seen, unix_s=1e9):
    """Sees the asker at `seen`, and confirms every address."""
    return answering(
        lambda q: Reached(q.maddrs) if isinstance(q, DialBack) else Seen(seen, "public", True, unix_s)
    )


async def homes(world, **options):
    """A relay, and two homes that only it brings together."""
    await world.host(1, **({"relay": RelayLimits()} | options))
    for home in (2, 3):
        await world.host(home, "symmetric")
        await world.meet(home, 1)
    await asyncio.sleep(1)


def by_hand(world, source, relay, target, protocol):
    """A circuit of a node that asks nobody whether it may."""
    host = world.hosts[source]
    credentials = prover(Identity(bytes([source]) * 32))
    relay_id, target_id = world.hosts[relay].peer_id, world.hosts[target].peer_id
    return open_circuit(host._base, world.run, credentials, relay_id, target_id, protocol)


def test_nonsense_in_a_look_kills_nobody(run_world):
    async def scenario(world):
        places = ("/ip4/999.1.1.1/tcp/1", "/ip4/x/udp/1/quic-v1", "/ip4/11.1.1.1/udp/99999/quic-v1")
        seed = await world.plain(9, liar(places, math.nan))
        host = await world.host(2)
        await host.connect(PeerAddress(seed.peer_id, (seed.maddr,)))
        await asyncio.sleep(10)
        assert not world.tasks[2].done()
        assert host.routes().clock_ahead_s is None
        assert host.routes().observed == ()

    run_world(scenario)


def test_one_liar_does_not_make_a_home_public(run_world):
    async def scenario(world):
        fake = await world.plain(9, liar(("/memory/77",)))
        await world.host(1)
        home = await world.host(2, "port-keeping")
        await home.connect(PeerAddress(fake.peer_id, (fake.maddr,)))
        await world.meet(2, 1)
        await asyncio.sleep(30)
        assert home.routes().reach != "public"
        assert any("p2p-circuit" in maddr for maddr in await home.addresses())

    run_world(scenario)


def test_peers_of_our_own_network_do_not_hide_the_one_outside(run_world):
    async def scenario(world):
        host = await world.host(2, is_outside=is_global)
        for number in range(10, 17):
            place = "/ip4/11.1.1.1/udp/4001/quic-v1" if number == 16 else "/ip4/192.168.1.2/tcp/1"
            peer = await world.plain(number, liar((place,)))
            await host.connect(PeerAddress(peer.peer_id, (peer.maddr,)))
            await asyncio.sleep(3)
        await asyncio.sleep(20)
        assert "11.1.1.1" in host.routes().why

    run_world(scenario)


def test_a_restless_network_does_not_use_up_our_looks(run_world):
    async def scenario(world):
        looks = []
        seed = await world.plain(9, answering(lambda q: looks.append(q) or Seen((), "public", False, 1e9)))
        host = await world.host(2)
        await host.connect(PeerAddress(seed.peer_id, (seed.maddr,)))
        for _ in range(300):
            host.survey.refresh()
            await asyncio.sleep(0.2)
        assert 20 < len(looks) <= 35

    run_world(scenario)


def test_what_a_peer_says_cannot_reach_into_the_terminal(run_world):
    async def scenario(world):
        seed = await world.plain(9, answering(lambda q: NatRefused("\x1b[2J\x07go away")))
        host = await world.host(2)
        await host.connect(PeerAddress(seed.peer_id, (seed.maddr,)))
        with pytest.raises(Unreachable) as caught:
            await request(host._base, seed.peer_id, Look(world.run), Seen)
        assert str(caught.value).isprintable()

    run_world(scenario)


def test_dial_backs_never_go_inside_and_are_few(run_world):
    async def scenario(world):
        await world.host(1, is_outside=lambda maddr: False)
        await world.host(3)
        await world.host(2)
        for seed in (1, 3):
            await world.meet(2, seed)
        base = world.hosts[2]._base
        question = DialBack(world.run, await base.addresses())
        assert (await request(base, world.hosts[1].peer_id, question, Reached)).maddrs == ()
        with contextlib.suppress(Unreachable):
            for _ in range(30):
                await request(base, world.hosts[3].peer_id, question, Reached)
        with pytest.raises(Unreachable, match="too many"):
            await request(base, world.hosts[3].peer_id, question, Reached)

    run_world(scenario)


def test_summons_lead_to_a_few_dials_and_to_no_names(run_world):
    async def scenario(world):
        await world.host(2)
        evil = await world.plain(9, {})
        await evil.connect(PeerAddress(world.hosts[2].peer_id, await world.hosts[2].addresses()))
        target = world.hosts[2].peer_id

        async def summon(number, place):
            punch = sign_punch(world.run, Identity(bytes([number]) * 32), target, bytes([number]) * 16, ())
            await request(evil, target, Summons(punch, (place,)), Coming)

        said = await asyncio.gather(
            *(summon(100 + number, "/memory/999") for number in range(40)), return_exceptions=True
        )
        assert said.count(None) == SUMMONS_AT_ONCE
        await asyncio.sleep(30)
        await summon(150, "/memory/999")
        with pytest.raises(Unreachable, match="no address"):
            await summon(151, "/dns4/victim.example.org/udp/1/quic-v1")

    run_world(scenario)


def test_circuits_that_break_while_they_open_use_nothing_up(run_world):
    async def scenario(world):
        target = await world.host(2)
        evil = await world.plain(9, {})
        await evil.connect(PeerAddress(target.peer_id, await target.addresses()))
        credentials = prover(Identity(bytes([9]) * 32))

        async def half():
            stream = await evil.open_stream(target.peer_id, CIRCUIT_PROTOCOL)
            await write_frame(stream, codec.encode(Incoming(world.run, evil.peer_id)))
            await read_frame(stream, NAT_MAX_BYTES)
            inside = await handshake(stream, credentials, "", client=True)
            await asyncio.sleep(1)
            await write_frame(inside, HOLD_PROTOCOL.encode())
            return stream, inside

        for _ in range(70):
            stream, _ = await half()
            stream.reset()
        await asyncio.sleep(30)
        _, inside = await half()
        assert decode_opening(await read_frame(inside, NAT_MAX_BYTES)) == OpenCircuit()

    run_world(scenario)


def test_the_peer_that_a_relay_brings_is_the_one_that_was_asked_for(run_world):
    async def scenario(world):
        async def bring_ourselves(stream):
            """A relay that answers for every peer; its own proof of who it is is a good one."""
            await read_frame(stream, NAT_MAX_BYTES)
            await write_frame(stream, codec.encode(OpenCircuit()))
            inside = await handshake(stream, prover(Identity(bytes([9]) * 32)), "", client=False)
            assert await read_frame(inside, 100) == ECHO.encode()
            await write_frame(inside, codec.encode(OpenCircuit()))

        relay = await world.plain(9, {RELAY_PROTOCOL: bring_ourselves})
        caller = await world.plain(2, {})
        await caller.connect(PeerAddress(relay.peer_id, (relay.maddr,)))
        own = prover(Identity(bytes([2]) * 32))
        honest = await open_circuit(caller, world.run, own, relay.peer_id, relay.peer_id, ECHO)
        assert honest.peer == relay.peer_id
        wanted = Identity(bytes([3]) * 32).peer_id
        with pytest.raises(Unreachable, match="brought"):
            await open_circuit(caller, world.run, own, relay.peer_id, wanted, ECHO)

    run_world(scenario)


def test_nonsense_in_a_circuit_is_nobodys_proven_fault(run_world):
    """The relay may have changed what the other end sent: blaming either could ban a correct node."""

    async def scenario(world):
        target = await world.host(2)
        blamed = []
        target._base._on_fault = lambda peer, fault: blamed.append(peer)
        relay = await world.plain(9, {})
        await relay.connect(PeerAddress(target.peer_id, await target.addresses()))
        stream = await relay.open_stream(target.peer_id, CIRCUIT_PROTOCOL)
        await write_frame(stream, codec.encode(Incoming(world.run, relay.peer_id)))
        await read_frame(stream, NAT_MAX_BYTES)
        inside = await handshake(stream, prover(Identity(bytes([9]) * 32)), "", client=True)
        await write_frame(inside, bytes(1000))
        with pytest.raises(Unreachable):
            await read_frame(inside, NAT_MAX_BYTES)
        assert blamed == []

    run_world(scenario)


def test_who_is_sent_away_is_served_through_no_relay(run_world):
    async def scenario(world):
        await homes(world)
        with pytest.raises(Unreachable, match="nothing is held"):
            await by_hand(world, 3, 1, 2, ECHO)
        hold = await by_hand(world, 3, 1, 2, HOLD_PROTOCOL)
        stream = await by_hand(world, 3, 1, 2, ECHO)
        await write_frame(stream, b"hello")
        assert await read_frame(stream, 100) == b"hello"
        await world.hosts[2].disconnect(world.hosts[3].peer_id)
        for ended in (hold, stream):
            with pytest.raises(Unreachable):
                async with asyncio.timeout(2):
                    await ended.read_exactly(1)
        with pytest.raises(Unreachable, match="nothing is held"):
            await by_hand(world, 3, 1, 2, ECHO)

    run_world(scenario)


def test_a_hidden_node_dials_no_relay_that_a_peer_names(run_world):
    async def scenario(world):
        await world.host(1, relay=RelayLimits())
        await world.host(2, relay_only=True, trusted=(1,))
        await world.host(3)
        evil = await world.host(4, relay=RelayLimits())
        for other in (2, 3):
            await world.meet(other, 1)
        named = f"{(await evil.addresses())[0]}/p2p/{evil.peer_id}/p2p-circuit"
        await world.hosts[2].connect(PeerAddress(world.hosts[3].peer_id, (named,)))
        await asyncio.sleep(60)
        assert not await evil.connections()

    run_world(scenario)


def test_nobody_alone_fills_the_circuits_to_a_peer(run_world):
    async def scenario(world):
        await homes(world, relay=RelayLimits(circuits_per_peer=2))
        await world.host(4)
        await world.meet(4, 1)
        for _ in range(2):
            await by_hand(world, 4, 1, 3, HOLD_PROTOCOL)
        await world.meet(2, 3)

    run_world(scenario)


def test_a_slow_download_is_not_an_idle_circuit(run_world):
    async def drip(stream):
        for _ in range(6):
            await asyncio.sleep(20)
            await write_frame(stream, b"drop")

    async def scenario(world):
        await homes(world)
        world.hosts[3].set_handler("/test/drip/1", drip)
        await world.meet(2, 3)
        stream = await world.hosts[2].open_stream(world.hosts[3].peer_id, "/test/drip/1")
        for _ in range(6):
            assert await read_frame(stream, 100) == b"drop"
        await stream.close()
        idle = await world.hosts[2].open_stream(world.hosts[3].peer_id, ECHO)
        await asyncio.sleep(70)
        with pytest.raises(Unreachable):
            await read_frame(idle, 100)

    run_world(scenario)


def test_downloads_through_a_slow_relay_do_not_break_the_hold(run_world):
    async def scenario(world):
        await homes(world, relay=RelayLimits(rate_bytes_s=50_000))
        await world.meet(2, 3)
        events = world.hosts[2].events()
        async with asyncio.TaskGroup() as group:
            for _ in range(6):
                group.create_task(world.say(2, 3, bytes(300_000)))
        await world.hosts[2].disconnect(world.hosts[1].peer_id)
        heard = []
        async for event in events:
            heard.append(event)
            if event == PeerDisconnected(world.hosts[1].peer_id):
                break
        assert heard == [PeerDisconnected(world.hosts[1].peer_id)]

    run_world(scenario)


def test_a_silent_relay_is_passed_over_for_the_second(run_world):
    async def scenario(world):
        world.network.silence_s = 30.0
        await homes(world)
        await world.host(5, relay=RelayLimits())
        for home in (2, 3):
            await world.meet(home, 5)
        await world.meet(2, 3)
        await asyncio.sleep(15)
        first, second = world.hosts[2]._held.circuits_to(world.hosts[3].peer_id)
        assert first.relay != second.relay
        world.network.cut({world.hosts[2].peer_id}, {first.relay})
        async with asyncio.timeout(6):
            assert await world.say(2, 3, b"hello") == b"hello"

    run_world(scenario)


def test_a_connection_that_comes_while_we_count_is_no_loss(run_world):
    async def scenario(world):
        await world.host(1)
        host = await world.host(2)
        events, counted = host.events(), host._base.connections

        async def slow():
            found = await counted()
            await asyncio.sleep(0.5)
            return found

        host._base.connections = slow
        counting = world.group.create_task(host.connections())
        await asyncio.sleep(0.1)
        await world.meet(2, 1)
        await counting
        assert [type(event).__name__ for event in events._events] == ["PeerConnected"]

    run_world(scenario)


def test_the_circuits_that_we_announce_go_through_relays(run_world):
    async def scenario(world):
        await world.host(2, "symmetric")
        for number in range(10, 17):
            await world.host(number, relay=RelayLimits() if number == 16 else None)
            await world.meet(2, number)
        await asyncio.sleep(20)
        assert any(world.hosts[16].peer_id in maddr for maddr in await world.hosts[2].addresses())

    run_world(scenario)


def test_a_circuit_is_announced_where_its_relay_listens_though_the_relay_dialled_too(run_world):
    """Two dials at once make two connections, and the relay's by TCP has a port at which nobody answers."""
    listens, dialled_us = "/ip4/203.0.113.7/tcp/4710", "/ip4/203.0.113.7/tcp/51234"

    async def scenario(world):
        relay = await world.host(1, relay=RelayLimits())
        home = await world.host(2, "symmetric")
        connect, listed, there = home._base.connect, home._base.connections, await relay.addresses()

        async def by_name(address, within_s):
            await connect(PeerAddress(address.peer, there), within_s)

        async def both():
            return tuple(replace(one, maddr=maddr) for one in await listed() for maddr in (listens, dialled_us))

        home._base.connect, home._base.connections = by_name, both
        await home.connect(PeerAddress(relay.peer_id, ("/dns4/relay.example/tcp/4710",)))
        circuits = [maddr for maddr in await home.addresses() if "p2p-circuit" in maddr]
        assert circuits == [f"{listens}/p2p/{relay.peer_id}/p2p-circuit"]

    run_world(scenario)
