"""The NAT wire: golden bytes, and what a peer cannot make us do."""

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.p2p.host.framing import read_frame, write_frame
from atoll.p2p.limits.token_bucket import PeerRateLimit
from atoll.p2p.nat.nat_protocol import PROTOCOL, REQUESTS_PER_MINUTE, punch_addresses, request
from atoll.protocols import codec
from atoll.protocols.errors import DecodeError, SignatureFault, Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId, RunId, digest
from atoll.protocols.nat import (
    Coming,
    DialBack,
    Look,
    NatRefused,
    OpenCircuit,
    Punch,
    Reached,
    Seen,
    Summons,
    check_punch,
    decode_answer,
    decode_ask,
    decode_opening,
    sign_punch,
)

RUN = RunId(bytes(32))
A, B = Identity(b"a" * 32), Identity(b"b" * 32)
PUNCH = sign_punch(RUN, A, B.peer_id, bytes(16), ("/ip4/5.5.5.5/tcp/1",))

PLACE = "/ip4/5.5.5.5/tcp/1"
PLACE_HEX = "91b22f6970342f352e352e352e352f7463702f31"
GOLDEN = {
    "look": (Look(RUN), "92a46c6f6f6bc420" + "00" * 32),
    "seen": (
        Seen((PLACE,), "public", True, 1.5),
        "95a47365656e" + PLACE_HEX + "a67075626c6963c3cb3ff8000000000000",
    ),
    "dial-back": (DialBack(RUN, ()), "93a96469616c2d6261636bc420" + "00" * 32 + "90"),
    "reached": (Reached((PLACE,)), "92a772656163686564" + PLACE_HEX),
    "coming": (Coming((), (PLACE,)), "93a6636f6d696e6790" + PLACE_HEX),
    "refused": (NatRefused("no"), "92a772656675736564a26e6f"),
    "open": (OpenCircuit(), "91a46f70656e"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes(name):
    message, golden = GOLDEN[name]
    assert codec.encode(message).hex() == golden
    assert codec.decode(bytes.fromhex(golden), type(message)) == message


@pytest.mark.parametrize("place", ["", PLACE + "\n", "\x1b[2J", "/ip4/5.5.5.5 /tcp/1", "/é", "x" * 257])
def test_an_address_that_is_no_plain_text_is_refused(place):
    with pytest.raises(DecodeError):
        decode_answer(codec.encode(["reached", [place]]))


def test_golden_punch():
    assert digest(codec.encode(PUNCH)).hex()[:16] == "a8ad740f8a7ffced"
    assert check_punch(PUNCH) == A.peer_id


@given(st.binary(max_size=400))
def test_decoders_return_or_raise_decode_error(data):
    for decode in (decode_ask, decode_answer, decode_opening):
        with contextlib.suppress(DecodeError):
            decode(data)


def test_a_punch_that_was_changed_does_not_verify():
    for change in ({"target": A.peer_id}, {"claims": ()}, {"nonce": b"x" * 16}, {"source": B.peer_id}):
        fields = {f: getattr(PUNCH, f) for f in PUNCH.__struct_fields__} | change
        with pytest.raises(SignatureFault):
            check_punch(Punch(**fields))


def test_of_what_a_rendezvous_sees_only_quic_is_dialled():
    """By TCP it sees the port of a dial, where nobody answers."""
    seen = ("/ip4/5.5.5.5/tcp/1", "/ip4/5.5.5.5/udp/1/quic-v1", "/dns4/a.example/udp/1/quic-v1", "nonsense")
    claims = ("/ip4/6.6.6.6/tcp/1", "/dns4/a.example/tcp/1")
    assert punch_addresses((), seen) == seen[1:2]
    assert punch_addresses((), seen[:1]) == ()
    assert punch_addresses(claims, seen) == (*claims, seen[1])


def test_an_allowance_runs_out_and_comes_back():
    now = [0.0]
    allowance = PeerRateLimit(60, lambda: now[0])
    assert sum(allowance.take(A.peer_id) for _ in range(100)) == 60
    assert allowance.take(B.peer_id)
    now[0] = 1.0
    assert allowance.take(A.peer_id)
    assert not allowance.take(A.peer_id)


def test_a_dial_back_goes_to_the_asker_and_nowhere_else(run_world):
    async def scenario(world):
        await world.host(1)
        await world.host(2)
        await world.host(3)
        await world.meet(2, 1)
        base, seed = world.hosts[2]._base, world.hosts[1].peer_id
        (own,), (other,) = await base.addresses(), await world.hosts[3]._base.addresses()
        reached = await request(base, seed, DialBack(world.run, (own, other)), Reached)
        assert reached.maddrs == (own,)

    run_world(scenario)


def test_a_punch_in_the_name_of_another_is_a_fault_of_the_asker(run_world):
    async def scenario(world):
        await world.host(1)
        await world.host(2)
        await world.host(3, "port-keeping")
        for home in (2, 3):
            await world.meet(home, 1)
        forged = sign_punch(world.run, A, world.hosts[3].peer_id, bytes(16), ())
        with pytest.raises(Unreachable):
            await request(world.hosts[2]._base, world.hosts[1].peer_id, forged, Coming)

    run_world(scenario)


def test_an_old_summons_is_refused(run_world):
    async def scenario(world):
        await world.host(1)
        await world.host(2)
        await world.meet(2, 1)
        punch = sign_punch(world.run, A, world.hosts[2].peer_id, bytes(16), ())
        base, target = world.hosts[1]._base, world.hosts[2].peer_id
        summons = Summons(punch, ("/memory/9",))
        await request(base, target, summons, Coming)
        with pytest.raises(Unreachable, match="an old one"):
            await request(base, target, summons, Coming)

    run_world(scenario)


def test_asks_are_counted(run_world):
    async def scenario(world):
        await world.host(1)
        await world.host(2)
        await world.meet(2, 1)
        base, seed = world.hosts[2]._base, world.hosts[1].peer_id
        answered = 0
        with contextlib.suppress(Unreachable):
            while answered < 2 * REQUESTS_PER_MINUTE:
                await request(base, seed, Look(world.run), Seen)
                answered += 1
        assert REQUESTS_PER_MINUTE / 2 < answered <= REQUESTS_PER_MINUTE + 10
        with pytest.raises(Unreachable, match="too many asks"):
            await request(base, seed, Look(world.run), Seen)
        assert not world.faults

    run_world(scenario)


def test_garbage_on_the_wire_harms_nobody(run_world):
    async def scenario(world):
        await world.host(1)
        await world.host(2)
        await world.meet(2, 1)
        for protocol in (PROTOCOL, "/atoll/circuit/1"):
            stream = await world.hosts[2]._base.open_stream(world.hosts[1].peer_id, protocol)
            await write_frame(stream, b"\xc1garbage")
            with pytest.raises(Unreachable):
                async with asyncio.timeout(30):
                    await read_frame(stream, 100)
        seen = await request(world.hosts[2]._base, PeerId(world.hosts[1].peer_id), Look(world.run), Seen)
        assert seen.maddrs

    run_world(scenario)
