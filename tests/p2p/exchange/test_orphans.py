"""Entries of an author with two histories: asked for by name, kept apart, and never taken for a feed."""

import asyncio
from pathlib import Path

import pytest

from atoll.p2p.exchange.orphans import EPOCHS_MAX, METHOD, FoundEntries, NameIndex, OrphanExchange, WantedEntries
from atoll.p2p.ledger import store
from atoll.p2p.ledger.reader import EntryReader
from atoll.p2p.ledger.store import Ledger
from atoll.protocols.errors import DecodeError
from atoll.protocols.ids import Digest, PeerId, Round, digest
from atoll.protocols.ledger.records import (
    Ballot,
    Contribution,
    Entry,
    Epoch,
    Leave,
    Reduction,
    Vote,
    encode_entry,
    epoch_id,
    sign_entry,
)
from atoll.protocols.run.arena import Span
from tests.p2p.exchange.test_sync import AUTHORS, RUN, Side, feed, run_pair

LIAR, HONEST = AUTHORS[0], AUTHORS[1]
PROPOSAL = digest(b"proposal")


def history(first: int) -> list[Entry]:
    """Three entries of the liar about rounds from `first` on, and a vote in the round of the last."""
    entries = feed(LIAR, 3, first_round=first)
    vote = Vote(Round(first + 2), Ballot(0, HONEST.peer_id), PROPOSAL)
    return [*entries, sign_entry(RUN, LIAR, 3, entries[-1].id, vote)]


ONE, TWO = history(0), history(50)


def forked(path: Path) -> Ledger:
    """A ledger with the first history, and a proof of the second."""
    ledger = Ledger(path / "ledger.sqlite", RUN)
    ledger.insert_all([*ONE, TWO[0]])
    assert ledger.equivocators() == {LIAR.peer_id}
    return ledger


def test_orphans_are_kept_apart_from_feeds_and_survive_a_restart(tmp_path: Path) -> None:
    ledger = forked(tmp_path)
    assert ledger.add_orphans(TWO[1:]) == tuple(TWO[1:])
    assert ledger.add_orphans(TWO[1:]) == (), "known ones are not new"
    assert ledger.add_orphans(ONE) == (), "nor what the feed holds"
    ledger.close()
    again = Ledger(tmp_path / "ledger.sqlite", RUN)
    assert again.orphans() == TWO[1:]
    assert again.orphans(51) == [TWO[1]]
    assert again.orphan(TWO[1].id) == TWO[1]
    assert again.get(TWO[1].id) is None
    assert again.vector() == {LIAR.peer_id: len(ONE)}
    assert [entry for _, entry in again.since(0)] == ONE
    again.close()


def test_only_equivocators_have_orphans(tmp_path: Path) -> None:
    ledger = forked(tmp_path)
    others = feed(HONEST, 2)
    assert ledger.add_orphans(others) == ()
    assert ledger.orphans() == []
    ledger.close()


def test_an_answer_may_be_the_first_proof(tmp_path: Path) -> None:
    """Two histories of one length do not show in an exchange."""

    async def scenario(a: Side, b: Side) -> None:
        a.ledger.insert_all(ONE)
        b.ledger.insert_all([*TWO, *feed(HONEST, 3)])
        await a.sync.exchange(b.host.peer_id)
        assert not a.ledger.equivocators() | b.ledger.equivocators()
        ours, _ = exchange_of(a), exchange_of(b)
        ours.want(WantedEntries(Round(52), (TWO[2].id,), (PROPOSAL,)))
        assert await ours.fetch(b.host.peer_id) == 2
        assert a.ledger.equivocators() == {LIAR.peer_id} == set(a.faults)
        # What is no orphan is an entry like any other.
        ours.want(WantedEntries(Round(1), (feed(HONEST, 2)[1].id,)))
        assert await ours.fetch(b.host.peer_id) == 0
        assert a.ledger.vector()[HONEST.peer_id] == 3

    run_pair(tmp_path, scenario)


def test_an_author_has_no_more_than_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "ORPHANS_MAX", 2)
    ledger = forked(tmp_path)
    assert ledger.add_orphans(TWO) == tuple(TWO[:2])
    assert ledger.add_orphans(TWO) == ()
    ledger.close()


def split(a: Side, b: Side) -> OrphanExchange:
    """Both know of the fork, and hold different histories. Returns what `a` asks with."""
    a.ledger.insert_all([*ONE, TWO[0]])
    b.ledger.insert_all([*TWO, ONE[0]])
    return exchange_of(a)


def exchange_of(side: Side) -> OrphanExchange:
    return OrphanExchange(side.sync)


def test_what_is_wanted_comes_by_name_and_votes_by_their_proposal(tmp_path: Path) -> None:
    async def scenario(a: Side, b: Side) -> None:
        ours, theirs = split(a, b), exchange_of(b)
        found: list[Entry] = []
        ours.on_found = found.extend
        assert await ours.fetch(b.host.peer_id) == 0, "nothing is wanted"
        ours.want(WantedEntries(Round(52), (TWO[2].id, digest(b"nobody has it")), (PROPOSAL,)))
        assert await ours.fetch(b.host.peer_id) == 2
        assert found == [TWO[2], TWO[3]] == a.ledger.orphans()
        assert await ours.fetch(b.host.peer_id) == 0
        # What was kept is served to others.
        theirs.want(WantedEntries(Round(2), (ONE[2].id,)))
        assert await theirs.fetch(a.host.peer_id) == 1
        assert (await ours._answer(b.host.peer_id, ours.wanted[52])).entries == tuple(map(encode_entry, TWO[2:]))
        ours.want(WantedEntries(Round(52)))
        ours.want(WantedEntries(Round(51), (TWO[2].id,)))
        assert [*ours.wanted] == [51]
        assert await ours.fetch(b.host.peer_id) == 0, "it is of another round"

    run_pair(tmp_path, scenario)


def test_several_rounds_are_asked_about_at_a_time(tmp_path: Path) -> None:
    async def scenario(a: Side, b: Side) -> None:
        ours, _ = split(a, b), exchange_of(b)
        ours.want(WantedEntries(Round(51), (TWO[1].id,)))
        ours.want(WantedEntries(Round(52), (TWO[2].id,)))
        assert await ours.fetch(b.host.peer_id) == 2
        assert a.ledger.orphans() == TWO[1:3]

    run_pair(tmp_path, scenario)


def test_signatures_under_an_epoch_come_by_its_id_whatever_their_round(tmp_path: Path) -> None:
    """The liar's is an orphan here; the honest member's belongs into its feed."""
    body = Epoch(Round(51), b"", tuple(sorted((LIAR.peer_id, HONEST.peer_id))))
    liars = sign_entry(RUN, LIAR, 4, TWO[3].id, body)
    others = feed(HONEST, 1)
    signed = sign_entry(RUN, HONEST, 1, others[0].id, body)

    async def scenario(a: Side, b: Side) -> None:
        ours = split(a, b)
        exchange_of(b)
        b.ledger.insert_all([*others, signed])
        b.ledger.add_orphans([liars])
        a.ledger.insert_all(others)
        ours.want(WantedEntries(Round(7), (epoch_id(body),)))
        assert await ours.fetch(b.host.peer_id) == 1
        assert a.ledger.orphans() == [liars]
        assert a.ledger.get(signed.id) == signed
        ours.want(WantedEntries(Round(7), (digest(b"another epoch"),)))
        assert await ours.fetch(b.host.peer_id) == 0
        # What was kept, or stands in a feed, is found for others.
        answer = await ours._answer(b.host.peer_id, WantedEntries(Round(0), (epoch_id(body),)))
        assert {*answer.entries} == {encode_entry(liars), encode_entry(signed)}

    run_pair(tmp_path, scenario)


def test_what_nobody_asked_for_is_refused(tmp_path: Path) -> None:
    async def scenario(a: Side, b: Side) -> None:
        ours = split(a, b)
        ours.want(WantedEntries(Round(52), (TWO[2].id,)))
        lies = [TWO[1], TWO[3], sign_entry(RUN, LIAR, 9, digest(b""), Leave(Round(52)))]

        async def lie(peer: PeerId, wanted: WantedEntries) -> FoundEntries:
            return FoundEntries((encode_entry(TWO[2]), encode_entry(lies[0])))

        b.calls.register(METHOD, WantedEntries, FoundEntries, lie)
        while lies:
            with pytest.raises(DecodeError, match="nobody asked for"):
                await ours.fetch(b.host.peer_id)
            lies.pop(0)
        assert a.ledger.orphans() == []

    run_pair(tmp_path, scenario)


def test_an_answer_has_a_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(a: Side, b: Side) -> None:
        ours, _ = split(a, b), exchange_of(b)
        ours.want(WantedEntries(Round(52), (TWO[2].id,), (PROPOSAL,)))
        monkeypatch.setattr("atoll.p2p.exchange.orphans.ANSWER_BYTES", 10)
        assert await ours.fetch(b.host.peer_id) == 1

    run_pair(tmp_path, scenario)


def contribution() -> Entry:
    """The liar's work of round 50, behind its second history."""
    body = Contribution(
        round=Round(50),
        base=digest(b"base"),
        payload=digest(b"payload"),
        tokens=1,
        steps=1,
        loss=1.0,
        weight=1,
    )
    return sign_entry(RUN, LIAR, len(TWO), TWO[-1].id, body)


def reduction(members: Digest, number: int = 50) -> Entry:
    """A Reduction by the honest author that covers these."""
    body = Reduction(
        round=Round(number),
        span=Span(0, 1),
        payload=digest(b"payload"),
        rows=digest(b"rows"),
        kept=digest(b"kept"),
        previous=b"",
        covered=b"\1",
        more=(),
        members=members,
    )
    return sign_entry(RUN, HONEST, 0, b"", body)


def test_what_a_reduction_covers_comes_by_the_digest_of_all_its_members(tmp_path: Path) -> None:
    """A Reduction names no author's history: who holds the other one could never read it."""

    async def scenario(a: Side, b: Side) -> None:
        work = contribution()
        b.ledger.insert_all([*TWO, work])
        ours, members = split(a, b), digest(b"all members")
        exchange_of(b)
        b.ledger.insert_all([reduction(members)])
        for other in (WantedEntries(Round(51), (members,)), WantedEntries(Round(50), (digest(b"others"),))):
            ours.want(other, covered=True)
            assert await ours.fetch(b.host.peer_id) == 0
        ours.want(WantedEntries(Round(50), (members,)), covered=True)
        ours.want(WantedEntries(Round(50), (digest(b"nobody has it"),)))
        assert [*ours.wanted] == [*ours.covered] == [50], "both are asked for"
        assert await ours.fetch(b.host.peer_id) == 1
        assert a.ledger.orphans() == [work]
        assert ([*ours.wanted], ours.covered) == ([50], {}), "what is covered is asked for once"

    run_pair(tmp_path, scenario)


def test_covered_work_is_asked_for_only_where_somebody_has_two_histories(tmp_path: Path) -> None:
    async def scenario(a: Side, b: Side) -> None:
        ours = exchange_of(a)
        ours.want(WantedEntries(Round(50), (digest(b"members"),)), covered=True)
        assert not ours.covered

    run_pair(tmp_path, scenario)


def votes(count: int, proposals: int = 1) -> list[Entry]:
    """Votes of the honest member in one round, for some proposals in turn."""
    signed: list[Entry] = []
    for number in range(count):
        body = Vote(Round(7), Ballot(number, HONEST.peer_id), digest(bytes([number % proposals])))
        previous = signed[-1].id if signed else b""
        signed.append(sign_entry(RUN, HONEST, number, previous, body))
    return signed


def test_an_answer_reads_only_what_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question of 38 bytes must not make a node decode all its epochs, or all votes of a round, each time."""

    async def scenario(a: Side, b: Side) -> None:
        signed = votes(300, proposals=100)
        b.ledger.insert_all(signed)
        theirs, read = exchange_of(b), []
        decode = EntryReader.decode
        monkeypatch.setattr(EntryReader, "decode", lambda self, data: read.append(data) or decode(self, data))
        unknown = WantedEntries(Round(7), (digest(b"no"),), (digest(b"no"),))
        assert (await theirs._answer(a.host.peer_id, unknown)).entries == ()
        assert len(read) == 300, "once"
        read.clear()
        assert (await theirs._answer(a.host.peer_id, unknown)).entries == ()
        assert not read
        wanted = WantedEntries(Round(7), (), (digest(bytes([5])), digest(bytes([2])), digest(bytes([5]))))
        answer = await theirs._answer(a.host.peer_id, wanted)
        assert answer.entries == tuple(map(encode_entry, [*signed[5::100], *signed[2::100]])), "each name once"
        assert len(read) == 6
        read.clear()
        more = sign_entry(RUN, HONEST, 300, signed[-1].id, Vote(Round(7), Ballot(0, LIAR.peer_id), digest(b"no")))
        b.ledger.insert_all([more])
        assert (await theirs._answer(a.host.peer_id, unknown)).entries == (encode_entry(more),)
        assert len(read) <= 3

    run_pair(tmp_path, scenario)


def test_other_tasks_run_while_an_index_is_made(tmp_path: Path) -> None:
    async def scenario(a: Side, b: Side) -> None:
        b.ledger.insert_all(votes(640))
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            counting = group.create_task(count())
            await exchange_of(b)._answer(a.host.peer_id, WantedEntries(Round(7), (), (digest(b"no"),)))
            counting.cancel()
        assert turns >= 10

    run_pair(tmp_path, scenario)


def test_votes_of_another_round_are_not_found(tmp_path: Path) -> None:
    async def scenario(a: Side, b: Side) -> None:
        theirs = split(a, b)
        a.ledger.add_orphans(TWO[3:])
        assert (await theirs._answer(b.host.peer_id, WantedEntries(Round(52), (), (PROPOSAL,)))).entries
        assert not (await theirs._answer(b.host.peer_id, WantedEntries(Round(51), (), (PROPOSAL,)))).entries

    run_pair(tmp_path, scenario)


def test_an_index_forgets_what_is_gone() -> None:
    """Authors that were pruned wrote any number of entries: an index has at most twice those that are here."""
    rows = [(number, entry) for number, entry in enumerate(votes(8), start=1)]
    table = {number: rows[number % 8][1] for number in range(1, 3 * EPOCHS_MAX)}

    def read(cursor: int, limit: int) -> list[tuple[int, Entry]]:
        return [(n, table[n]) for n in range(cursor + 1, cursor + 1 + limit) if n in table]

    async def scenario() -> None:
        index = NameIndex(read)
        assert len(await index.find([digest(bytes([0]))])) == len(table)
        for number in range(3 * EPOCHS_MAX, 12 * EPOCHS_MAX):
            table[number] = rows[number % 8][1]
        assert len(await index.find([digest(bytes([0]))])) == len(table)
        gone = [number for number in table if number < 12 * EPOCHS_MAX - 10]
        for number in gone:
            del table[number]
        index._begin = lambda: 12 * EPOCHS_MAX - 11
        assert len(await index.find([digest(bytes([0]))])) == len(table) == 10

    asyncio.run(scenario())
