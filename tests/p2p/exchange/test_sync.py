"""Two ledgers become their union over calls, in capped batches, with proofs and without false blame."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.node.runs.presets import preset
from atoll.p2p.exchange.floors import RecordsGone
from atoll.p2p.exchange.sync import BATCH_BYTES, MESSAGE_BYTES, METHOD, Exchange, LedgerSync, is_behind
from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.ledger.admission_gate import AdmissionGate
from atoll.p2p.ledger.history import Cut
from atoll.p2p.ledger.insertion import InsertResult
from atoll.p2p.ledger.shares import Quota
from atoll.p2p.ledger.store import CLOSED, Ledger
from atoll.p2p.rpc.calls import Calls
from atoll.p2p.transports.memory.memory_network import MemoryNetwork
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols import codec
from atoll.protocols.errors import DecodeError, PeerFault, SignatureFault, Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId, Round, RunId, digest
from atoll.protocols.ledger import records
from atoll.protocols.ledger.records import MAX_SET, Ack, Ballot, Entry, Leave, Proposal, encode_entry, sign_entry
from atoll.protocols.run.admission import AdmissionSpec

RUN = RunId(digest(b"run"))
AUTHORS = [Identity(bytes([number]) * 32) for number in range(1, 7)]


def feed(author: Identity, size: int, first_round: int = 0) -> list[Entry]:
    entries: list[Entry] = []
    for seq in range(size):
        previous = entries[-1].id if entries else b""
        entries.append(sign_entry(RUN, author, seq, previous, Leave(Round(first_round + seq))))
    return entries


class Side:
    """A ledger that can sync, on a simulated host."""

    def __init__(
        self,
        network: MemoryNetwork,
        number: int,
        path: Path,
        quota: Quota | None = None,
        run: RunId = RUN,
        gate: AdmissionGate | None = None,
    ) -> None:
        self.host = network.host(Identity(bytes([100 + number]) * 32).peer_id)
        self.ledger = Ledger(path / f"{number}.sqlite", run, quota, gate)
        self.refusals: list[str] = []
        self.faults: list[PeerId] = []
        self.fresh: list[Entry] = []
        self.calls = Calls(self.host, run, on_fault=self.blame)
        self.sync = LedgerSync(
            *(self.ledger, self.calls, lambda _, done: self.fresh.extend(done.fresh), self.blame),
            lambda _, told: self.refusals.extend([told.refusal] if told.refusal else []),
        )

    def blame(self, peer: PeerId, fault: PeerFault) -> None:
        self.faults.append(peer)


def run_pair(
    path: Path,
    scenario: Callable[[Side, Side], Awaitable[None]],
    quota: Quota | None = None,
    run: RunId = RUN,
    gate: AdmissionGate | None = None,
) -> None:
    """Run `scenario` with two connected sides, the second with `quota` and `gate`."""

    async def main() -> None:
        network = MemoryNetwork(seed=1, latency_s=0.01)
        sides = [Side(network, 0, path, run=run), Side(network, 1, path, quota, run, gate)]
        async with asyncio.TaskGroup() as group:
            tasks = []
            for side in sides:
                ready = asyncio.Event()
                tasks.append(group.create_task(side.host.serve(ready.set)))
                tasks.append(group.create_task(side.calls.serve()))
                await ready.wait()
            await sides[0].host.connect(PeerAddress(sides[1].host.peer_id, (sides[1].host.maddr,)))
            await asyncio.sleep(1)
            try:
                await scenario(sides[0], sides[1])
            finally:
                for task in tasks:
                    task.cancel()
                for side in sides:
                    side.ledger.close()

    run_virtual(main())


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6), st.integers(0, 6)), max_size=6))
def test_one_exchange_makes_the_union(
    tmp_path_factory: pytest.TempPathFactory, shares: list[tuple[int, int, int]]
) -> None:
    async def scenario(a: Side, b: Side) -> None:
        for author, ours, theirs in shares:
            a.ledger.insert_all(feed(AUTHORS[author], ours))
            b.ledger.insert_all(feed(AUTHORS[author], theirs))
        expected = {
            author: max(a.ledger.vector().get(author, 0), b.ledger.vector().get(author, 0))
            for author in a.ledger.vector() | b.ledger.vector()
        }
        before = a.ledger.vector()
        assert await a.sync.exchange(b.host.peer_id) == sum(expected.values()) - sum(before.values())
        assert a.ledger.vector() == b.ledger.vector() == expected
        assert not a.faults
        assert await b.sync.exchange(a.host.peer_id) == 0

    run_pair(tmp_path_factory.mktemp("union"), scenario)


def test_what_two_neighbours_bring_is_verified_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verified = list[PeerId]()

    def verify(author: PeerId, *signed: bytes) -> None:
        verified.append(author)
        real(author, *signed)

    async def scenario(a: Side, b: Side) -> None:
        entries = feed(AUTHORS[0], 9)
        a.ledger.insert_all(entries[:5])
        for _ in range(2):
            brought = Exchange({}, False, (), tuple(map(encode_entry, entries)), ())
            await b.calls.call(a.host.peer_id, METHOD, brought, Exchange, max_bytes=MESSAGE_BYTES)
        assert a.ledger.vector() == {AUTHORS[0].peer_id: 9}
        assert verified == [AUTHORS[0].peer_id] * 4

    real = records.verify
    monkeypatch.setattr(records, "verify", verify)
    run_pair(tmp_path, scenario)


def test_what_two_neighbours_bring_at_the_same_time_is_verified_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a partition all neighbours of the other side bring the same batch within a moment."""
    verified = list[PeerId]()

    def verify(author: PeerId, *signed: bytes) -> None:
        verified.append(author)
        real(author, *signed)

    async def scenario(a: Side, b: Side) -> None:
        brought = Exchange({}, False, (), tuple(map(encode_entry, feed(AUTHORS[0], 100))), ())
        # Calls have turns, but this node's own exchanges, and one call beside them, go on side by side.
        fresh = await asyncio.gather(*(a.sync._insert(b.host.peer_id, brought) for _ in range(3)))
        assert sum(fresh) == a.ledger.vector()[AUTHORS[0].peer_id] == 100
        assert len(verified) == 100
        assert not a.sync._verified, "nothing is remembered"

    real = records.verify
    monkeypatch.setattr(records, "verify", verify)
    run_pair(tmp_path, scenario)


def test_a_forged_entry_is_refused_beside_a_batch_that_holds_the_true_one(tmp_path: Path) -> None:
    true = [encode_entry(entry) for entry in feed(AUTHORS[0], 100)]
    false = [*true[:-1], true[-1][:-1] + bytes([true[-1][-1] ^ 1])]

    async def scenario(a: Side, b: Side) -> None:
        found = await asyncio.gather(a.sync.verified(false), a.sync.verified(true), return_exceptions=True)
        assert isinstance(found[0], SignatureFault)
        assert [*map(encode_entry, found[1])] == true
        assert not a.sync._verified

    run_pair(tmp_path, scenario)


SHARED = 3
"""Entries of each author before a partition."""
APART = {0: 340, 1: 340, 2: 340, 3: 340, 4: 340, 5: 700}
"""Entries of each author since: the last is the smaller side's."""


def part(ledger: Ledger, authors: Iterable[int]) -> None:
    for number, size in APART.items():
        ledger.insert_all(feed(AUTHORS[number], SHARED + (size if number in authors else 0)))


@pytest.mark.parametrize("smaller_leads", [True, False])
def test_the_smaller_side_of_a_partition_takes_first(tmp_path: Path, smaller_leads: bool) -> None:
    """Whoever asks: else each of the larger side verifies all that the smaller has before it brings anything."""
    given = list[int]()

    async def scenario(large: Side, small: Side) -> None:
        part(large.ledger, range(5))
        part(small.ledger, [5])

        def told(peer: PeerId, done: InsertResult) -> None:
            if all(small.ledger.vector()[AUTHORS[n].peer_id] == SHARED + APART[n] for n in range(5)):
                given.append(large.ledger.vector()[AUTHORS[5].peer_id])

        small.sync.on_exchanged = told
        one, other = (small, large) if smaller_leads else (large, small)
        await one.sync.exchange(other.host.peer_id)
        assert large.ledger.vector() == small.ledger.vector()
        assert sum(large.ledger.vector().values()) == 6 * SHARED + sum(APART.values())
        assert not [*large.faults, *small.faults]
        assert 0 < given[0] <= APART[5] // 2

    run_pair(tmp_path, scenario)


def test_who_claims_to_have_more_is_given_all_in_smaller_batches(tmp_path: Path) -> None:
    async def scenario(a: Side, b: Side) -> None:
        part(a.ledger, range(5))
        claims = {author.peer_id: 1 << 39 for author in AUTHORS[1:]}
        wanted, batches = {AUTHORS[0].peer_id: 0}, list[int]()
        while wanted[AUTHORS[0].peer_id] < SHARED + APART[0]:
            message = Exchange(claims | wanted, False, (), (), ())
            answer = await b.calls.call(a.host.peer_id, METHOD, message, Exchange, max_bytes=MESSAGE_BYTES)
            batches.append(sum(map(len, answer.entries)))
            wanted[AUTHORS[0].peer_id] += len(answer.entries)
            assert len(batches) < 6
        assert max(batches) <= BATCH_BYTES // 8

    run_pair(tmp_path, scenario)


def test_who_has_more_for_the_other() -> None:
    a, b, c, d, e = (PeerId(name) for name in "abcde")
    apart = {a: 100, b: 100, c: 100, d: 9, e: 9}, {a: 9, b: 9, c: 9, d: 100, e: 100}
    assert is_behind(apart[1], apart[0])
    assert not is_behind(*apart)
    assert not is_behind({a: 100, b: 9}, {a: 9, b: 100}), "halves give and take side by side"
    assert not is_behind({a: 9, b: 9, c: 9}, {a: 25, b: 25, c: 25}), "news of the moment"
    assert is_behind({a: 9, b: 9}, {a: 9, b: 26, c: 0})
    assert not is_behind({a: 9}, {a: CLOSED}), "it asks for nothing"
    assert not is_behind({a: 9}, {a: 9, b: 100, c: 100}), "authors that one of them does not know"


def test_large_ledgers_travel_in_batches_below_the_cap(tmp_path: Path) -> None:
    names = tuple(sorted(digest(number.to_bytes(2, "big")) for number in range(MAX_SET)))
    author = AUTHORS[0]
    big: list[Entry] = []
    for seq in range(20):
        body = Proposal(Round(seq), Ballot(0, author.peer_id), names, digest(b"state"))
        big.append(sign_entry(RUN, author, seq, big[-1].id if big else b"", body))
    assert sum(len(encode_entry(entry)) for entry in big) > 2 * BATCH_BYTES

    async def scenario(a: Side, b: Side) -> None:
        b.ledger.insert_all(big)
        a.ledger.insert_all(feed(AUTHORS[1], 300))
        moved: list[int] = []
        a.sync.on_answer = lambda _, moved_bytes: moved.append(moved_bytes)
        assert await a.sync.exchange(b.host.peer_id) == 20
        assert a.ledger.vector() == b.ledger.vector() == {author.peer_id: 20, AUTHORS[1].peer_id: 300}
        assert sum(moved) == sum(len(encode_entry(entry)) for entry in (*big, *feed(AUTHORS[1], 300))), "both ways"
        assert a.fresh == big
        assert len(b.fresh) == 300

    run_pair(tmp_path, scenario)


def test_a_fork_travels_as_a_proof_and_blames_its_author_only(tmp_path: Path) -> None:
    liar = AUTHORS[2]

    async def scenario(a: Side, b: Side) -> None:
        a.ledger.insert_all(feed(liar, 3))
        b.ledger.insert_all(feed(liar, 2, first_round=50))
        await a.sync.exchange(b.host.peer_id)
        assert a.ledger.equivocators() == b.ledger.equivocators() == {liar.peer_id}
        assert set(a.faults) | set(b.faults) == {liar.peer_id}

    run_pair(tmp_path, scenario)


def test_a_full_ledger_ends_the_exchange(tmp_path: Path) -> None:
    async def scenario(a: Side, b: Side) -> None:
        for author in AUTHORS:
            a.ledger.insert_all(feed(author, 4))
        await a.sync.exchange(b.host.peer_id)
        assert sorted(b.ledger.vector().values()) == [3, 3]
        asked: list[str] = []
        call = a.calls.call

        async def count(peer: PeerId, method: str, *words: Any, **more: Any) -> Any:
            asked.append(method)
            return await call(peer, method, *words, **more)

        a.calls.call = count  # type: ignore[method-assign]
        await a.sync.exchange(b.host.peer_id)
        assert len(asked) <= 2, "what is refused is not offered again"

    run_pair(tmp_path, scenario, Quota(authors=2, author_entries=3))


@pytest.mark.parametrize("spoil", ["signature", "run", "bytes"])
def test_illegal_entries_are_blamed_on_the_sender_and_not_kept(tmp_path: Path, spoil: str) -> None:
    good = feed(AUTHORS[0], 1)[0]
    data = encode_entry(good)
    if spoil == "signature":
        data = data[:-1] + bytes([data[-1] ^ 1])
    elif spoil == "run":
        data = encode_entry(sign_entry(RunId(digest(b"other")), AUTHORS[0], 0, b"", Leave(Round(0))))
    else:
        data = b"\xc1" + data

    async def scenario(a: Side, b: Side) -> None:
        message = Exchange({}, False, (), (data,), ())
        with pytest.raises((PeerFault, Unreachable)):
            await a.calls.call(b.host.peer_id, METHOD, message, Exchange, max_bytes=1 << 20)
        assert b.faults == [a.host.peer_id]
        assert not b.ledger.vector()
        assert len(codec.encode(message)) < 1000

    run_pair(tmp_path, scenario)


def test_a_peer_that_is_not_admitted_hears_why_and_is_not_blamed(tmp_path: Path) -> None:
    spec = msgspec.structs.replace(
        preset("tiny", AUTHORS[0].peer_id, 1), admission=AdmissionSpec(mode="allowlist", members=())
    )

    def entry(author: Identity) -> Entry:
        return sign_entry(spec.id, author, 0, b"", Leave(Round(0)))

    async def scenario(stranger: Side, member: Side) -> None:
        stranger.ledger.insert_all([entry(Identity(bytes([100]) * 32)), entry(AUTHORS[0])])
        await stranger.sync.exchange(member.host.peer_id)
        await stranger.sync.exchange(member.host.peer_id)
        assert member.ledger.vector().keys() == {AUTHORS[0].peer_id}, "what it brought of others is taken"
        assert "is not on the list of peers that this run admits" in stranger.refusals[-1]
        assert (stranger.faults, member.faults, member.refusals) == ([], [], [])
        before = len(stranger.refusals)
        await member.sync.exchange(stranger.host.peer_id)
        assert len(stranger.refusals) > before, "whoever asks"

    run_pair(
        tmp_path, scenario, run=spec.id, gate=AdmissionGate(spec, Identity(bytes([101]) * 32).peer_id, lambda: 0.0)
    )


@pytest.mark.parametrize("reason", ["x" * 201, "\x1b[2J", "two\nlines"])
def test_a_reason_that_could_paint_a_terminal_is_refused(tmp_path: Path, reason: str) -> None:
    async def scenario(a: Side, b: Side) -> None:
        message = Exchange({}, False, (), (), (), reason)
        with pytest.raises((PeerFault, Unreachable)):
            await a.calls.call(b.host.peer_id, METHOD, message, Exchange, max_bytes=1 << 20)
        assert b.faults == [a.host.peer_id]
        assert b.refusals == []

    run_pair(tmp_path, scenario)


def rounds(author: Identity, size: int) -> list[Entry]:
    """Entries of a kind that a cut deletes."""
    entries: list[Entry] = []
    for seq in range(size):
        body = Ack(Round(seq), digest(b"set"), digest(b"state"))
        entries.append(sign_entry(RUN, author, seq, entries[-1].id if entries else b"", body))
    return entries


def test_who_lacks_what_a_cut_ledger_lacks_is_not_synchronised_with_it(tmp_path: Path) -> None:
    author = AUTHORS[0]

    async def scenario(a: Side, b: Side) -> None:
        b.ledger.insert_all(rounds(author, 9))
        b.ledger.cut(Cut(b"summary", last=5))
        with pytest.raises(RecordsGone, match="keeps recent records only") as gone:
            await a.sync.exchange(b.host.peer_id)
        assert gone.value.own_entries == 0
        a.ledger.insert_all(rounds(author, 5))
        with pytest.raises(RecordsGone):
            await a.sync.exchange(b.host.peer_id)
        a.ledger.insert_all(rounds(author, 6))
        assert await a.sync.exchange(b.host.peer_id) == 3, "what it has follows the floor"
        assert a.ledger.vector() == b.ledger.vector()
        assert await b.sync.exchange(a.host.peer_id) == 0, "the one that was cut needs nothing"
        assert not a.faults
        assert not b.faults

    run_pair(tmp_path, scenario)


def test_a_peer_proves_to_a_node_how_long_its_own_feed_is(tmp_path: Path) -> None:
    me = Identity(bytes([100]) * 32)

    async def scenario(a: Side, b: Side) -> None:
        assert a.host.peer_id == me.peer_id
        own = rounds(me, 9)
        b.ledger.insert_all(own)
        b.ledger.cut(Cut(b"summary", last=5))
        a.ledger.insert_all(own[:2])
        with pytest.raises(RecordsGone) as gone:
            await a.sync.exchange(b.host.peer_id)
        assert gone.value.own_entries == 9
        b.ledger.head = lambda author: rounds(AUTHORS[1], 3)[-1]  # type: ignore[method-assign]
        with pytest.raises(DecodeError, match="somebody else"):
            await a.sync.exchange(b.host.peer_id)

    run_pair(tmp_path, scenario)


def test_a_feed_that_ends_here_by_a_quota_is_nothing_that_a_peer_lacks(tmp_path: Path) -> None:
    async def scenario(a: Side, b: Side) -> None:
        a.ledger.insert_all(rounds(AUTHORS[0], 9))
        a.ledger.cut(Cut(b"summary", last=5))
        b.ledger.insert_all(rounds(AUTHORS[0], 3))
        assert b.ledger.wanted() == {AUTHORS[0].peer_id: CLOSED}
        await b.sync.exchange(a.host.peer_id)

    run_pair(tmp_path, scenario, Quota(author_entries=3))
