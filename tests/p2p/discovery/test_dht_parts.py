"""The parts of the DHT without a network: records and their store, lookups among liars, roles, names of runs."""

import asyncio
import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.runs.presets import preset
from atoll.p2p.discovery import dht_lookup, dht_records, dht_store
from atoll.p2p.discovery.dht_lookup import Answer, look_up, merged
from atoll.p2p.discovery.dht_role import Role, choose_part
from atoll.p2p.discovery.dht_store import RecordStore
from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols import codec
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Digest, PeerId, RunId, digest
from atoll.protocols.run.run_spec import sign_run

NOW = 1_700_000_000.0
KEY = dht_records.run_key(RunId(digest(b"a run")))


def person(number: int) -> Identity:
    return Identity(number.to_bytes(32, "big"))


def record(author: Identity, key: Digest = KEY, value: bytes = b"v", expires_s: float = NOW + 600) -> bytes:
    return dht_records.sign_record(author, key, value, int(expires_s))


def put(store: RecordStore, data: bytes, sender: Identity, now_s: float = NOW) -> bool:
    return store.put(data, sender.peer_id, now_s)


def kept(store: RecordStore) -> tuple[bytes, ...]:
    return store.at(KEY)


# --- the store ---------------------------------------------------------------------------------------


def test_a_record_is_kept_from_its_author_alone_until_it_expires():
    store, data = RecordStore(), record(person(1))
    assert not put(store, data, person(2)), "a record that another peer brings"
    assert not put(store, data[:-1], person(1))
    assert put(store, data, person(1))
    assert kept(store) == (data,)
    assert put(store, data, person(1)), "the same again"
    assert not put(store, record(person(1), expires_s=NOW + 500), person(1)), "an older one does not replace it"
    newer = record(person(1), value=b"newer", expires_s=NOW + 700)
    assert put(store, newer, person(1))
    assert kept(store) == (newer,)
    assert put(store, record(person(2), expires_s=NOW + 900), person(2), NOW + 800)
    assert len(kept(store)) == 1, "expired records are forgotten"


def test_a_full_key_refuses_newcomers_and_keeps_those_that_are_there(monkeypatch):
    monkeypatch.setattr(dht_records, "RECORDS_PER_KEY", 3)
    store = RecordStore()
    assert all(put(store, record(person(n)), person(n)) for n in (1, 2, 3))
    assert not put(store, record(person(4)), person(4))
    assert put(store, record(person(1), expires_s=NOW + 650), person(1)), "a member announces itself again"


def test_one_peer_has_few_records(monkeypatch):
    store = RecordStore()
    keys = [digest(bytes([n])) for n in range(dht_store.RECORDS_PER_AUTHOR + 1)]
    assert [put(store, record(person(1), key), person(1)) for key in keys] == [True] * (len(keys) - 1) + [False]


def test_the_store_has_a_size(monkeypatch):
    one = record(person(1), value=bytes(1000))
    monkeypatch.setattr(dht_store, "STORED_BYTES", 2 * len(one))
    store = RecordStore()
    assert [put(store, record(person(n), value=bytes(1000)), person(n)) for n in (1, 2, 3)] == [True, True, False]
    assert put(store, record(person(3), value=bytes(1000), expires_s=NOW + 900), person(3), NOW + 700), (
        "room again"
    )


@given(st.binary(max_size=300))
def test_any_bytes_are_refused(data):
    assert not put(RecordStore(), data, person(1))


# --- lookups -----------------------------------------------------------------------------------------


class Net:
    """Peers that know others; those that are not there are silent."""

    def __init__(self, knows: dict[str, Iterable[str]]) -> None:
        self.knows = knows
        self.asked: list[PeerId] = []

    async def ask(self, address: PeerAddress) -> Answer | None:
        self.asked.append(address.peer)
        if address.peer not in self.knows:
            await asyncio.sleep(3.0)
            return None
        await asyncio.sleep(0.1)
        named = itertools.islice(self.knows[address.peer], dht_records.NAMED)
        return (address.peer.encode(),), tuple(at(peer) for peer in named)


def at(peer: str) -> PeerAddress:
    return PeerAddress(PeerId(peer), ("/memory/1",))


def far(peer: PeerId) -> int:
    return int(peer)


def test_a_lookup_goes_from_peer_to_peer():
    net = Net({str(n): [str(n - 1)] for n in range(1, 10)} | {"0": []})
    answers = run_virtual(look_up([at("9")], far, net.ask))
    assert [address.peer for address in answers] == [str(n) for n in range(10)], "the nearest first"
    assert answers[at("0")] == (b"0",)


def test_peers_that_do_not_exist_cost_bounded_time_and_hide_nobody():
    """A liar names twenty silent peers that are nearer than the honest ones, whenever it is asked."""
    fakes = [str(n) for n in range(1000)]
    net = Net({"1000": ["1001", "1002", "1003", "1004"], "1001": [], "1002": fakes, "1003": [], "1004": []})

    async def main() -> tuple[float, dict[PeerAddress, tuple[bytes, ...]]]:
        began = asyncio.get_running_loop().time()
        found = await look_up([at("1000")], far, net.ask)
        return asyncio.get_running_loop().time() - began, found

    took_s, answers = run_virtual(main())
    assert took_s <= dht_lookup.LOOKUP_S
    assert {address.peer for address in answers} == set(net.knows)
    assert len(net.asked) <= 5 + dht_records.NAMED


@pytest.mark.parametrize("liar_s", [0.5, 2.0])
def test_a_false_address_does_not_hide_a_server(liar_s):
    """A liar names a server that is known, and one that an honest server names, where nobody is."""

    async def ask(address: PeerAddress) -> Answer | None:
        if address.peer == "0":
            await asyncio.sleep(liar_s)
            return (), tuple(PeerAddress(PeerId(peer), ("/memory/66",)) for peer in ("20", "30"))
        await asyncio.sleep(1.0)
        named = (at("30"),) if address.peer == "7" else ()
        return ((), named) if address.peer in ("7", "20", "30") and "/memory/1" in address.maddrs else None

    answers = run_virtual(look_up([*map(at, "01234567"), at("20")], far, ask))
    assert [address.peer for address in answers] == ["0", "7", "20", "30"]


def test_a_peer_that_answers_with_much_crowds_out_nobody():
    lies = tuple(b"%d" % n for n in range(300))
    found = merged([lies, (b"true", b"0")])
    assert len(found) == dht_records.RECORDS_PER_KEY
    assert b"true" in found[:2]


# --- what a node does, and what a record says ---------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "reach", "is_public", "has_bootstrap", "role"),
    [
        ("auto", "public", True, False, Role.SERVER),
        ("auto", "punchable", True, False, Role.CLIENT),
        ("auto", "relay-only", True, False, Role.OFF),
        ("auto", "unknown", True, False, Role.OFF),
        ("auto", "unknown", True, True, Role.CLIENT),
        ("auto", "relay-only", True, True, Role.CLIENT),
        ("auto", "public", False, True, Role.OFF),
        (True, "unknown", False, False, Role.SERVER),
        (True, "public", True, False, Role.SERVER),
        (True, "punchable", True, True, Role.CLIENT),
        (True, "relay-only", True, True, Role.CLIENT),
        (False, "public", True, True, Role.OFF),
    ],
)
def test_the_part_of_a_node(setting, reach, is_public, has_bootstrap, role):
    part = choose_part(setting, reach, is_public=is_public, has_bootstrap=has_bootstrap)
    assert part.role == role
    assert part.why


OWNER = person(8)
RUN_FILE = sign_run(preset("tiny", OWNER.peer_id, 1, "synthetic:markov"), OWNER)


def listing(author: Identity, since_s: float, run_file: bytes = RUN_FILE) -> bytes:
    return record(author, dht_records.RUNS_KEY, codec.encode(dht_records.Listing(run_file, int(since_s))))


def test_the_age_of_a_run_is_its_owners_claim_else_the_median():
    members = [listing(person(n), NOW - age) for n, age in ((1, 100), (2, 200), (3, 10**9))]
    (run,) = dht_records.read_runs(members, NOW).values()
    assert run.age_s == 200
    assert run.run_file == RUN_FILE
    (run,) = dht_records.read_runs([*members, listing(OWNER, NOW - 500)], NOW).values()
    assert run.age_s == 500
    (run,) = dht_records.read_runs([listing(OWNER, NOW + 500)], NOW).values()
    assert run.age_s == 0


def test_a_run_that_its_owner_did_not_sign_is_not_listed():
    forged = RUN_FILE[:-64] + bytes(64)
    records = [listing(person(1), NOW, forged), listing(person(1), NOW, b"junk"), record(person(1))]
    assert dht_records.read_runs(records, NOW) == {}


def test_a_chain_of_servers_without_an_end_is_left_after_the_deadline():
    """Each names twenty that are nearer, and answers: nobody in the DHT can be told from them."""

    async def ask(address: PeerAddress) -> Answer | None:
        await asyncio.sleep(0.5)
        return (), tuple(at(str(int(address.peer) - step)) for step in range(1, 21))

    async def main() -> float:
        began = asyncio.get_running_loop().time()
        assert await look_up([at("1000000")], far, ask)
        return asyncio.get_running_loop().time() - began

    assert run_virtual(main()) <= 13.0


# --- golden: docs/wires/dht.md; messages and records are in tests/golden ---------------------------------


def test_keys_and_places_have_these_bytes():
    assert KEY.hex() == "e4cefc5dee4fcdc6c30780fa1863da4712e8b90939736e55df0084f648093663"
    assert dht_records.RUNS_KEY.hex() == "4533cc4671d4f72d2fdf39a9ee2747385b30430b0246b600c906950f92b33ff5"
    place = dht_records.place(person(1).peer_id)
    assert place.hex() == "1739e03e223602afd300b18f56e00aa58f2c258911c4ba2933cd57a623d7307d"
