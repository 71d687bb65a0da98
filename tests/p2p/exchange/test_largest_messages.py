"""What a node encodes of the largest ledger and register store that it can have, its peers decode."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.p2p.exchange import floors, orphans, sync
from atoll.p2p.exchange.sync import Exchange, LedgerSync
from atoll.p2p.ledger import proofs
from atoll.p2p.ledger.history import FeedEnd
from atoll.p2p.ledger.reader import EntryReader
from atoll.p2p.ledger.store import CLOSED, Ledger
from atoll.p2p.membership import register_sync
from atoll.p2p.membership.register_store import RegisterStore
from atoll.protocols import codec
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Digest, PeerId, Round, digest
from atoll.protocols.ledger.records import ENTRY_MAX_BYTES, MAX_SET, Leave, encode_entry, sign_entry
from atoll.protocols.ledger.registers import Addresses, Lease
from tests.p2p.exchange.test_sync import AUTHORS, RUN, Side, feed, run_pair

ME = Identity(bytes([100]) * 32)
CALLS: Any = SimpleNamespace(register=lambda *words, **more: None, me=ME.peer_id)


def names(many: int) -> list[PeerId]:
    """So many PeerIDs of full length, in order."""
    return [PeerId(f"12D3KooW{number:044}") for number in range(many)]


def decoded(message: Any, max_bytes: int) -> Any:
    """The message as a peer reads it. Raises DecodeError if it blames the sender."""
    return codec.decode(codec.encode(message), type(message), max_bytes=max_bytes)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger(tmp_path / "ledger.sqlite", RUN)
    yield opened
    opened.close()


@pytest.mark.parametrize("forked", [0, 1, 1023, 1024, 1025, 4097, 30_000])
@pytest.mark.parametrize("theirs", [0, 1024])
def test_an_exchange_of_any_ledger_is_legal(ledger: Ledger, forked: int, theirs: int, monkeypatch) -> None:
    """All places are taken, a batch is full of the smallest entries, each proof has the largest ones."""
    crowd = names(30_000)
    smallest = encode_entry(sign_entry(RUN, AUTHORS[0], 0, b"", Leave(Round(0))))
    batch = [smallest] * (sync.BATCH_BYTES // len(smallest))
    ledger._feeds = dict.fromkeys(crowd[-4096:], FeedEnd(CLOSED - 1, b"", 0))
    ledger._forked = set(crowd[:forked])
    monkeypatch.setattr(ledger, "missing", lambda *words, **more: batch)
    monkeypatch.setattr(ledger, "refusal", lambda peer: "x" * 300)
    monkeypatch.setattr(ledger._proofs, "get", lambda author: (bytes(ENTRY_MAX_BYTES),) * 2)
    other = Exchange({crowd[0]: 1, crowd[1]: 1}, False, tuple(crowd[2 : 2 + theirs]), (), ())
    ours = LedgerSync(ledger, CALLS, lambda *_: None, lambda *_: None)._state(other, AUTHORS[0].peer_id)
    assert decoded(ours, sync.MESSAGE_BYTES) == ours
    assert (len(ours.wanted), len(ours.forked), len(ours.proofs)) == (4096, min(forked, 1024), min(forked, 1))


def test_floors_of_any_ledger_are_legal_and_name_whom_it_matters(ledger: Ledger, monkeypatch) -> None:
    crowd, asker, head = names(9000), AUTHORS[0].peer_id, feed(AUTHORS[0], 1)[0]
    ledger.history.floors = dict.fromkeys([*crowd, asker], CLOSED)
    resting = {*crowd[:6000], asker}
    monkeypatch.setattr(Ledger, "resting", resting)
    monkeypatch.setattr(ledger, "head", lambda author: head)
    monkeypatch.setattr(floors, "encode_entry", lambda entry: bytes(ENTRY_MAX_BYTES))
    found = asyncio.run(floors.FloorCheck(ledger, CALLS)._answer(asker, floors.FloorsQuery()))
    assert decoded(found, floors.MESSAGE_BYTES) == found
    assert len(found.floors) == 4096
    assert found.floors.keys() >= {asker, *crowd[6000:]}, "made-up names come first by name, and rest"


@pytest.mark.parametrize("covered", [False, True])
def test_a_question_for_any_number_of_entries_is_legal(covered: bool) -> None:
    """A reduced set may have as many Reductions as a set has members, and nothing that they cover may be here."""
    store = SimpleNamespace(equivocators=lambda: {AUTHORS[0].peer_id}, reader=EntryReader(None))
    asking = orphans.OrphanExchange(SimpleNamespace(ledger=store, calls=CALLS))  # type: ignore[arg-type]
    wanted = tuple(Digest(digest(bytes([n % 256, n // 256]))) for n in range(MAX_SET))
    asking.want(orphans.WantedEntries(Round(0), wanted, wanted), covered=covered)
    (found,) = (asking.covered if covered else asking.wanted).values()
    assert decoded(found, orphans.MESSAGE_BYTES) == found
    assert (found.entries, found.proposals) == (wanted[:256], wanted[:256])


def test_an_answer_with_any_number_of_entries_is_legal() -> None:
    small, big = feed(AUTHORS[0], 1)[0], feed(AUTHORS[1], 2)[1]
    for found in ([small] * 5000, [big] * 5000, []):
        answer = orphans.FoundEntries(orphans._fitting(found))
        assert decoded(answer, orphans.MESSAGE_BYTES) == answer


@pytest.fixture
def registers() -> RegisterStore:
    return RegisterStore(RUN, ME, 1)


def test_a_pull_names_no_more_registers_than_fit(registers: RegisterStore) -> None:
    """Between two seconds thousands of authors that worked may have come and gone."""
    largest = (1 << 48) - 1
    for author in names(5000):
        for tag in ("lease", "holding", "addresses", "validation", "audit_call", "audit_findings"):
            registers._newest[author, tag] = (largest, largest, b"x")
    asking = register_sync.RegisterSync(registers, CALLS, lambda: 0.0, lambda news: None)
    known = asking._known()
    assert decoded(known, register_sync.MESSAGE_BYTES) == known
    assert names(5000)[-1] in {author for author, *_ in known.newest}, "the newest are named"


def test_an_answer_to_a_pull_is_legal_for_any_store(registers: RegisterStore) -> None:
    for number in range(1000):
        author = Identity(random.Random(number).randbytes(32))
        there = RegisterStore(RUN, author, 1)
        lease = Lease("training", Round(0), -1, b"", -1, 0.0)  # type: ignore[arg-type]
        for value in (Addresses(()), lease):
            registers.merge(there.publish(value, 60.0, 0.0), 0.0)
    asking = register_sync.RegisterSync(registers, CALLS, lambda: 0.0, lambda news: None)
    answer = asyncio.run(asking._answer(ME.peer_id, register_sync.KnownVersions(())))
    assert decoded(answer, register_sync.MESSAGE_BYTES) == answer
    assert len(answer.held) > 1000


def liars(many: int) -> list[Identity]:
    return [Identity(random.Random(1000 + number).randbytes(32)) for number in range(many)]


def test_proofs_reach_a_peer_however_many_there_are_and_no_exchange_runs_on(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(proofs, "NAMED", 8)
    crowd = liars(90)

    async def scenario(a: Side, b: Side) -> None:
        for side in (a, b):
            side.ledger.insert_all([feed(author, 1)[0] for author in crowd])
        a.ledger.insert_all([feed(author, 1, first_round=50)[0] for author in crowd])
        b.ledger.insert_all([feed(author, 1, first_round=70)[0] for author in crowd[:20]])
        for _ in range(4):
            asked = count_calls(a)
            await a.sync.exchange(b.host.peer_id)
            assert len(asked) <= 16
        assert a.ledger.equivocators() == b.ledger.equivocators() == {author.peer_id for author in crowd}
        asked = count_calls(a)
        await a.sync.exchange(b.host.peer_id)
        assert len(asked) == 1, "nothing is left to say"
        assert not set(a.faults + b.faults) - {author.peer_id for author in crowd}

    run_pair(tmp_path, scenario)


def test_an_exchange_ends_with_a_peer_that_takes_no_proof(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(proofs, "NAMED", 8)

    async def scenario(a: Side, b: Side) -> None:
        for author in liars(40):
            a.ledger.insert_all(feed(author, 1))
            a.ledger.insert_all(feed(author, 1, first_round=50))
        monkeypatch.setattr(b.ledger, "add_proof", lambda first, second: False)
        monkeypatch.setattr(a.ledger, "missing", lambda *words, **more: [])
        asked = count_calls(a)
        await a.sync.exchange(b.host.peer_id)
        assert len(asked) == 2

    run_pair(tmp_path, scenario)


def count_calls(side: Side) -> list[str]:
    """The calls that this side makes from now on."""
    asked: list[str] = []
    call = type(side.calls).call

    async def counted(peer: PeerId, method: str, *words: Any, **more: Any) -> Any:
        asked.append(method)
        return await call(side.calls, peer, method, *words, **more)

    side.calls.call = counted  # type: ignore[method-assign]
    return asked
