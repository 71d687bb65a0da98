"""DHT records are pure; the DHT runs on every transport, and on the simulated network with peers that lie."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.runs.presets import preset
from atoll.node.runs.public_runs import public_runs
from atoll.p2p.discovery import dht as module
from atoll.p2p.discovery import dht_records as records
from atoll.p2p.discovery.dht import ASK_S, BUCKET, REFRESH_S, Dht
from atoll.p2p.discovery.dht_lookup import LOOKUP_S
from atoll.p2p.discovery.dht_role import Part, Role
from atoll.p2p.host.interface import Host, PeerAddress
from atoll.p2p.rpc.single_request import SingleRequests
from atoll.protocols import codec
from atoll.protocols.errors import DecodeError, PeerFault, SignatureFault, Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId, RunId, digest
from atoll.protocols.ledger.registers import Addresses
from atoll.protocols.run.run_spec import sign_run
from atoll.protocols.wires import DHT

RUN = RunId(digest(b"a run"))
ME, OTHER = Identity(b"\x71" * 32), Identity(b"\x72" * 32)
NOW = 1_700_000_000.0
ADDRESSES = codec.encode(Addresses(("/ip4/203.0.113.7/tcp/4001", "nonsense")))


def test_a_record_round_trips() -> None:
    data = records.sign_record(ME, records.run_key(RUN), ADDRESSES, int(NOW) + 60)
    record = records.decode_record(data, NOW)
    assert (record.author, record.value, record.expires_s) == (ME.peer_id, ADDRESSES, int(NOW) + 60)
    (found,) = records.read_addresses([data, b"junk"], RUN, NOW)
    assert found.peer == ME.peer_id
    assert found.maddrs == ("/ip4/203.0.113.7/tcp/4001",), "an address that cannot be dialled is left out"
    assert records.read_addresses([data], RunId(digest(b"another")), NOW) == []


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: records.sign_record(ME, records.run_key(RUN), b"v", int(NOW) + 5000), DecodeError),
        (lambda: records.sign_record(ME, records.run_key(RUN), b"v", int(NOW) - 5000), DecodeError),
        (lambda: records.sign_record(ME, records.run_key(RUN), b"v" * 4000, int(NOW) + 60), DecodeError),
        (lambda: _forged(), SignatureFault),
        (lambda: b"\x81" * 300, DecodeError),
        (lambda: b"", DecodeError),
    ],
)
def test_an_illegal_record_is_refused(make: Callable[[], bytes], error: type[PeerFault]) -> None:
    with pytest.raises(error):
        records.decode_record(make(), NOW)


def _forged() -> bytes:
    data = records.sign_record(ME, records.run_key(RUN), b"v", int(NOW) + 60)
    record = codec.decode(data, records.DhtRecord)
    theirs = (record.version, record.key, OTHER.peer_id, record.expires_s, record.value, record.signature)
    return codec.encode(theirs)


@given(st.binary(max_size=400))
def test_any_bytes_give_a_record_or_a_peer_fault(data: bytes) -> None:
    with pytest.raises(PeerFault):
        records.decode_record(data, NOW)


# --- nodes on every transport, and on the simulated network with peers that lie ------------------------

SPEC = preset("tiny", ME.peer_id, 1, "synthetic:markov")
FILE = sign_run(SPEC, ME)
MADDRS = ("/ip4/203.0.113.7/tcp/4001",)
DEEP = b"\x91" * 4000
"""Lists in lists: 4000 levels."""


def person(host: Host) -> Identity:
    """The identity of a host of the lab, which numbers them from 1."""
    return next(one for one in map(Identity, (bytes([n]) * 32 for n in range(256))) if one.peer_id == host.peer_id)


async def node(lab, *bootstrap: Dht | PeerAddress, role: Role = Role.SERVER) -> Dht:
    """A node of the DHT on a new host of the lab."""
    host = await lab.host()
    seeds = [one if isinstance(one, PeerAddress) else await place_of(one) for one in bootstrap]
    dht = Dht(host, person(host), seeds, rng=random.Random(1), clock=lambda: NOW)
    dht.play(Part(role, "a test"), await host.addresses())
    await dht.refresh()
    return dht


async def place_of(dht: Dht) -> PeerAddress:
    return PeerAddress(dht.host.peer_id, await dht.host.addresses())


async def announce(
    dht: Dht, run: RunId = RUN, maddrs: tuple[str, ...] = MADDRS, file: bytes = FILE
) -> list[PeerAddress]:
    return await dht.announce(run, maddrs, records.Listing(file, int(NOW) - 60), is_owner=True)


def test_clients_find_what_was_announced_at_a_server(run_lab):
    async def scenario(lab) -> None:
        server = await node(lab)
        one, two = await node(lab, server, role=Role.CLIENT), await node(lab, server, role=Role.CLIENT)
        assert server.state == "server, knows no server yet: a test", "nobody names a client to others"
        assert one.state == "client, knows 1 server: a test"
        assert await announce(one) == []
        (found,) = await two.find(RUN)
        assert (found.peer, found.maddrs) == (one.host.peer_id, MADDRS)
        (listed,) = (await two.runs()).values()
        assert (listed.spec, listed.run_file, listed.age_s) == (SPEC, FILE, 60)
        assert await announce(two) == [found], "who announces itself learns who is there"
        assert {found.peer for found in await one.find(RUN)} == {one.host.peer_id, two.host.peer_id}

    run_lab(scenario)


def test_a_lone_server_lists_its_own_run(run_memory):
    async def scenario(lab) -> None:
        server = await node(lab)
        await announce(server, SPEC.id)
        client = await node(lab, server, role=Role.CLIENT)
        assert set(await client.runs()) == {SPEC.id}
        assert [found.peer for found in await client.find(SPEC.id)] == [server.host.peer_id]

    run_memory(scenario)


def test_without_a_server_nothing_is_found_or_announced(run_memory):
    async def scenario(lab) -> None:
        client = await node(lab, await node(lab, role=Role.CLIENT), role=Role.CLIENT)
        assert client.state == "client, knows no server yet: a test"
        for ask in (client.find(RUN), client.runs(), announce(client)):
            with pytest.raises(Unreachable, match="no server of the DHT is known"):
                await ask

    run_memory(scenario)


def test_nodes_reach_servers_that_they_never_met(run_memory):
    """A chain of forty servers: each knew only the one before it."""

    async def scenario(lab) -> None:
        chain = [await node(lab)]
        for _ in range(39):
            chain.append(await node(lab, chain[-1]))
        first, last = await node(lab, chain[0], role=Role.CLIENT), await node(lab, chain[-1], role=Role.CLIENT)
        await announce(first)
        assert [found.peer for found in await last.find(RUN)] == [first.host.peer_id]
        holders = [dht for dht in chain if dht._records.at(records.run_key(RUN))]
        near = sorted(chain, key=lambda dht: records.distance(records.run_key(RUN), dht.host.peer_id))
        assert set(holders) <= set(near[:12]), "records lie near their key"
        assert 3 <= len(holders) <= 5
        for dht in holders[1:]:
            await lab.stop(dht.host)
        assert await last.find(RUN), "one server that is left is enough"

    run_memory(scenario)


def test_a_bucket_has_room_for_few_and_keeps_the_old(run_memory):
    async def scenario(lab) -> None:
        dht = await node(lab)
        people = [Identity(n.to_bytes(32, "big")).peer_id for n in range(1, 200)]
        far = [peer for peer in people if dht._bucket(peer) == 256]
        for peer in far:
            dht._learn(PeerAddress(peer, MADDRS))
        assert list(dht._contacts) == far[:BUCKET]
        dht._learn(PeerAddress(far[0], ("/ip4/203.0.113.8/tcp/1",)))
        assert dht._contacts[far[0]].maddrs == ("/ip4/203.0.113.8/tcp/1",), "its newest address"
        near = next(peer for peer in people if dht._bucket(peer) < 256)
        dht._learn(PeerAddress(near, MADDRS))
        assert near in dht._contacts
        dht._learn(await place_of(dht))
        assert dht.host.peer_id not in dht._contacts

    run_memory(scenario)


def test_a_part_is_played_from_now_on(run_memory):
    async def scenario(lab) -> None:
        server, client = await node(lab), await node(lab, role=Role.OFF)
        client.bootstrap = (await place_of(server),)
        lab.spawn(client.serve())
        await asyncio.sleep(2 * REFRESH_S)
        assert (client.state, client.is_on) == ("off: a test", False)
        assert await client.host.connections() == ()
        client.play(Part(Role.CLIENT, "now"))
        await asyncio.sleep(1.0)
        assert client.state == "client, knows 1 server: now"
        server.play(Part(Role.OFF, "no more"))
        await asyncio.sleep(REFRESH_S + 1)
        assert client.state == "client, knows no server yet: now", "who does not serve is no contact"
        server.play(Part(Role.SERVER, "again"))
        await asyncio.sleep(5)
        assert client.state == "client, knows 1 server: now"

    run_memory(scenario)


def test_members_beyond_enough_spare_the_servers(run_memory, monkeypatch):
    monkeypatch.setattr(module, "WANTED_RECORDS", 2)
    monkeypatch.setattr(module, "WANTED_LISTINGS", 1)

    async def scenario(lab) -> None:
        server = await node(lab)
        members = [await node(lab, server, role=Role.CLIENT) for _ in range(30)]
        listing = records.Listing(FILE, int(NOW))
        for member in members:
            await member.announce(RUN, MADDRS, listing, is_owner=False)
        assert 3 <= len(await members[0].find(RUN)) < 20
        assert len(server._records.at(records.RUNS_KEY)) == 1
        owner = await node(lab, server, role=Role.CLIENT)
        await owner.announce(RUN, MADDRS, listing, is_owner=True)
        assert len(server._records.at(records.RUNS_KEY)) == 2, "an owner lists its run in any case"

    run_memory(scenario)


# --- hostile peers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_", [b"", b"junk", DEEP, b"\xc1", b"\x94" + b"\xa4find" + bytes(64)])
def test_a_request_that_is_none_is_a_fault_and_crashes_nothing(run_memory, request_):
    async def scenario(lab) -> None:
        server = await node(lab)
        client = await node(lab, server, role=Role.CLIENT)
        with pytest.raises(Unreachable):
            await client._requests.ask(server.host.peer_id, request_, 1 << 20)
        assert [peer for peer, _ in lab.faults] == [client.host.peer_id]
        await announce(client)
        assert await client.find(RUN)

    run_memory(scenario)


def test_records_of_others_are_not_kept(run_memory):
    async def scenario(lab) -> None:
        server = await node(lab)
        liar = await node(lab, server, role=Role.CLIENT)
        place, key = await place_of(server), records.run_key(RUN)
        theirs = records.sign_record(OTHER, key, ADDRESSES, int(NOW) + 60)
        forged = codec.decode(theirs, records.DhtRecord)
        own = codec.encode((1, key, liar.host.peer_id, forged.expires_s, forged.value, forged.signature))
        for data in (theirs, own, b"junk", DEEP, bytes(4000)):
            assert not await liar._put(place, data)
        assert server._records.at(key) == ()

    run_memory(scenario)


def lying(answer: Callable[[PeerId, bytes], Awaitable[bytes]]) -> Callable[[Any], Coroutine[Any, Any, Dht]]:
    """Makes a host that answers DHT requests with lies."""

    async def make(lab, *bootstrap: Dht) -> Dht:
        liar = await node(lab, *bootstrap)
        SingleRequests(liar.host, DHT.protocol(), 1 << 20).set_handler(answer)
        return liar

    return make


async def false_members(peer: PeerId, request: bytes) -> bytes:
    """Legal records of peers that do not exist, whoever asks for what; and more such peers, for ever."""
    key = codec.decode(request, records.FindRecords).key
    people = [Identity(random.randbytes(32)) for _ in range(records.RECORDS_PER_KEY)]
    value = codec.encode(Addresses(("/memory/77",)))
    made = tuple(records.sign_record(one, key, value, int(NOW) + 60) for one in people)
    return codec.encode(
        records.Found(made, tuple(records.Contact(one.peer_id, ("/memory/77",)) for one in people[:20]))
    )


def constant(data: bytes) -> Callable[[PeerId, bytes], Awaitable[bytes]]:
    async def answer(peer: PeerId, request: bytes) -> bytes:
        return data

    return answer


NOBODY = records.Contact(PeerId("nobody"), ("/memory/1",))
NONSENSE = [
    DEEP, b"\xc1", b"\xc7\xff\x40" * 500, codec.encode(records.Found((DEEP, b"junk", bytes(9000)), ())),
    codec.encode(((), ((NOBODY,) * 30))), codec.encode(((), (NOBODY,))), codec.encode(((b"x",) * 70_000, ())),
]  # fmt: skip


@pytest.mark.parametrize("answer", [false_members, *map(constant, NONSENSE)])
def test_a_liar_hides_nobody_and_costs_bounded_time(run_memory, answer):
    async def scenario(lab) -> None:
        server = await node(lab)
        honest = await node(lab, server, role=Role.CLIENT)
        await announce(honest, SPEC.id)
        liars = [await lying(answer)(lab, server) for _ in range(3)]
        new = await node(lab, *liars, server, role=Role.CLIENT)
        began = asyncio.get_running_loop().time()
        found = await new.find(SPEC.id)
        assert honest.host.peer_id in {address.peer for address in found}
        assert len(found) <= records.RECORDS_PER_KEY
        assert {run.spec.owner for run in (await new.runs()).values()} == {ME.peer_id}
        assert asyncio.get_running_loop().time() - began <= 2 * LOOKUP_S
        assert await announce(honest, SPEC.id), "it was, and is, a member"

    run_memory(scenario)


def test_runs_that_their_owner_did_not_sign_are_not_listed(run_memory):
    """A liar in the list: another's run with a broken signature, junk, and a run that it renamed."""

    async def scenario(lab) -> None:
        server = await node(lab)
        honest, liar = [await node(lab, server, role=Role.CLIENT) for _ in range(2)]
        await announce(honest, SPEC.id)
        for false in (FILE[:-64] + bytes(64), FILE.replace(b"tiny", b"huge"), b"junk", bytes(2000)):
            await announce(liar, SPEC.id, file=false)
            assert set(await honest.runs()) == {SPEC.id}

    run_memory(scenario)


def test_a_peer_that_asks_too_often_is_not_answered(run_memory, monkeypatch):
    monkeypatch.setattr(module, "REQUESTS_PER_MINUTE", 10)

    async def scenario(lab) -> None:
        server = await node(lab)
        client, other = [await node(lab, server, role=Role.CLIENT) for _ in range(2)]
        request = codec.encode(records.FindRecords(records.run_key(RUN), ()))
        asked = [await client._requests.ask(server.host.peer_id, request, 1 << 20) for _ in range(20)]
        assert any(asked)
        assert asked[-1] == b""
        await announce(other)
        assert await other.find(RUN), "others are"

    run_memory(scenario)


def test_large_answers_count_for_more(run_memory):
    """Few bytes ask for a list of a megabyte: what a peer gets in a minute is bounded, and what all get."""

    async def scenario(lab) -> None:
        server = await node(lab)
        clients = [await node(lab, server, role=Role.CLIENT) for _ in range(17)]
        value = bytes(records.VALUE_MAX_BYTES)
        for n in range(records.RECORDS_PER_KEY):
            author = Identity(n.to_bytes(32, "big"))
            data = records.sign_record(author, records.RUNS_KEY, value, int(NOW) + 60)
            assert server._records.put(data, author.peer_id, NOW)
        request = codec.encode(records.FindRecords(records.RUNS_KEY, ()))

        async def greedy(client: Dht) -> int:
            return sum([len(await client._requests.ask(server.host.peer_id, request, 1 << 20)) for _ in range(9)])

        limit = module.REQUESTS_PER_MINUTE * module.REQUEST_BYTES
        got = [await greedy(client) for client in clients]
        assert 800_000 < got[0] <= limit
        assert limit < sum(got) <= 11 * limit
        assert got[-1] == 0

    run_memory(scenario)


def test_servers_that_left_are_forgotten_wherever_they_stand(run_memory):
    async def scenario(lab) -> None:
        chain = [await node(lab)]
        for _ in range(29):
            chain.append(await node(lab, chain[-1]))
        client = await node(lab, *chain, role=Role.CLIENT)
        assert len(client._contacts) == 30
        client.bootstrap = ()
        for dht in chain[10:]:
            await lab.stop(dht.host)
        for _ in range(60):
            await client.refresh()
        assert set(client._contacts) == {dht.host.peer_id for dht in chain[:10]}

    run_memory(scenario)


def test_a_node_that_is_off_asks_nobody(run_memory):
    async def scenario(lab) -> None:
        client = await node(lab, await node(lab), role=Role.CLIENT)
        client.play(Part(Role.OFF, "no more"))
        with pytest.raises(Unreachable, match="no server of the DHT is known"):
            await client.find(RUN)

    run_memory(scenario)


def test_a_search_beside_liars_ends_in_time(run_memory):
    """Peers that do not exist are silent, so each lookup takes its whole time."""

    async def scenario(lab) -> None:
        server = await node(lab)
        await announce(await node(lab, server, role=Role.CLIENT), SPEC.id)
        liars = [await lying(false_members)(lab) for _ in range(2)]
        host = await lab.host()
        connect = host.connect

        async def hanging(address: PeerAddress) -> None:
            if "/memory/77" in address.maddrs:
                await asyncio.sleep(60)
            await connect(address)

        host.connect = hanging
        seeds = [await place_of(one) for one in (*liars, server)]
        new = Dht(host, person(host), seeds, rng=random.Random(1), clock=lambda: NOW)
        new.play(Part(Role.CLIENT, "a test"))
        began = asyncio.get_running_loop().time()
        assert set(await public_runs(new)) == {SPEC.id}
        assert asyncio.get_running_loop().time() - began <= LOOKUP_S + ASK_S + 1

    run_memory(scenario)
