"""A newcomer gets a chain of links, a summary in parts and its records; nothing else, and never without an end."""

from pathlib import Path

import pytest

from atoll.p2p.exchange.summaries import (
    ANSWER_BYTES,
    LINK,
    PART,
    PART_BYTES,
    RECORDS,
    SUMMARY_MAX_BYTES,
    LinkAnswer,
    LinkQuery,
    PartAnswer,
    PartQuery,
    RecordsAnswer,
    RecordsQuery,
    SummaryExchange,
)
from atoll.p2p.ledger.history import Cut, Link, StoredLink
from atoll.protocols.blobs import manifest_of_bytes
from atoll.protocols.errors import DecodeError, PeerFault, SignatureFault
from atoll.protocols.ids import PeerId, digest
from atoll.protocols.ledger.records import encode_entry
from tests.p2p.exchange.test_sync import AUTHORS, Side, feed, run_pair

ONE, TWO = (author.peer_id for author in AUTHORS[:2])
SUMMARY = bytes(range(256)) * 2500
"""Three parts, and no whole number of them."""
NAME = manifest_of_bytes(SUMMARY).id
LINKS = (
    StoredLink(Link(b"first", (b"vote",)), digest(b"other"), b"other"),
    StoredLink(Link(b"last", (b"vote", b"vote")), NAME, SUMMARY),
)


def both(a: Side, b: Side) -> SummaryExchange:
    for side in (a, b):
        SummaryExchange(side.ledger, side.calls).register()
    return asking(a)


def asking(side: Side) -> SummaryExchange:
    return SummaryExchange(side.ledger, side.calls)


def test_a_newcomer_gets_all_that_a_summary_stands_for_and_goes_on_from_there(tmp_path: Path) -> None:
    async def scenario(a: Side, b: Side) -> None:
        mine, theirs = feed(AUTHORS[0], 400), feed(AUTHORS[1], 6)
        b.ledger.insert_all([*mine, *theirs])
        floors = {ONE: mine[380].id, TWO: theirs[4].id}
        cut = Cut(SUMMARY, 390, (), floors, LINKS)
        b.ledger.cut(cut)  # a Leave stays for good: these are the records that a summary names
        ours, peer = both(a, b), b.host.peer_id
        assert [await ours.link(peer, number) for number in range(3)] == [LINKS[0].link, LINKS[1].link, None]
        assert await ours.summary(peer, NAME) == SUMMARY
        named = [*mine[:381], *theirs[:5]]
        records = {}
        await ours.records(peer, [entry.id for entry in named], records)
        assert [records[entry.id] for entry in named] == named
        a.ledger.cut(cut, named)
        assert a.ledger.history.floors == {ONE: 380, TWO: 4}
        assert a.ledger.vector() == {ONE: 381, TWO: 5}
        assert (a.ledger.history.summary, a.ledger.history.links) == (SUMMARY, LINKS)
        assert await a.sync.exchange(peer) == 19 + 1
        assert a.ledger.vector() == b.ledger.vector()
        assert await SummaryExchange(b.ledger, b.calls).summary(a.host.peer_id, NAME) == SUMMARY
        assert a.faults == b.faults == []

    run_pair(tmp_path, scenario)


def test_links_and_floors_are_there_after_a_start_and_go_with_the_next_cut(tmp_path: Path) -> None:
    async def scenario(a: Side, b: Side) -> None:
        mine = feed(AUTHORS[0], 6)
        a.ledger.cut(Cut(SUMMARY, 3, (), {ONE: mine[4].id}, LINKS), mine[:5])
        again = type(a.ledger.history)(a.ledger._db)
        assert (again.links, again.floors, again.summary) == (LINKS, {ONE: 4}, SUMMARY)
        a.ledger.cut(Cut(SUMMARY, 3, (), {ONE: mine[4].id}, LINKS[1:]))
        assert type(a.ledger.history)(a.ledger._db).links == LINKS[1:]

    run_pair(tmp_path, scenario)


def test_another_summary_and_one_without_an_end_are_refused(tmp_path: Path) -> None:
    async def scenario(a: Side, b: Side) -> None:
        ours, peer = asking(a), b.host.peer_id
        asked = []
        answers = {"none": b"", "short": SUMMARY[:-1], "changed": b"\1" + SUMMARY[1:]}

        async def lie(_: PeerId, query: PartQuery) -> PartAnswer:
            asked.append(query.part)
            if not answers:
                return PartAnswer(bytes(PART_BYTES))
            data = next(iter(answers.values()))
            return PartAnswer(data[query.part * PART_BYTES :][:PART_BYTES])

        b.calls.register(PART, PartQuery, PartAnswer, lie, max_bytes=ANSWER_BYTES)
        while answers:
            with pytest.raises(DecodeError, match="not the summary"):
                await ours.summary(peer, NAME)
            answers.pop(next(iter(answers)))
        asked.clear()
        with pytest.raises(DecodeError, match="not the summary"):
            await ours.summary(peer, NAME)
        assert len(asked) == SUMMARY_MAX_BYTES // PART_BYTES

    run_pair(tmp_path, scenario)


def test_records_that_nobody_asked_for_or_that_never_come_are_refused(tmp_path: Path) -> None:
    async def scenario(a: Side, b: Side) -> None:
        ours, peer, mine = asking(a), b.host.peer_id, feed(AUTHORS[0], 4)
        forged = encode_entry(mine[0])[:-1] + b"\0"
        answers = [(encode_entry(mine[3]),), (encode_entry(mine[0]), encode_entry(mine[3])), (forged,)]

        asked: list[RecordsQuery] = []

        async def lie(_: PeerId, query: RecordsQuery) -> RecordsAnswer:
            asked.append(query)
            return RecordsAnswer(answers[0])

        b.calls.register(RECORDS, RecordsQuery, RecordsAnswer, lie, max_bytes=ANSWER_BYTES)
        while len(answers) > 1:
            with pytest.raises(DecodeError, match="other entries than were asked for"):
                await ours.records(peer, [mine[0].id, mine[1].id], {})
            answers.pop(0)
            assert len(asked) == 1, "it is not asked again"
            asked.clear()
        with pytest.raises((DecodeError, SignatureFault)):
            await ours.records(peer, [mine[0].id], {})
        for answers[0], found in (((), set()), ((encode_entry(mine[1]),), {mine[1].id})):
            asked.clear()
            records = {}
            await ours.records(peer, [entry.id for entry in mine], records)
            assert records.keys() == found
            assert len(asked) == 1, "who has not all is asked no more"

    run_pair(tmp_path, scenario)


def test_a_link_that_is_too_large_is_a_fault(tmp_path: Path) -> None:
    async def scenario(a: Side, b: Side) -> None:
        ours, peer = asking(a), b.host.peer_id
        large = Link(bytes(60_000), tuple(bytes(60_000) for _ in range(30)))

        async def lie(_: PeerId, query: LinkQuery) -> LinkAnswer:
            return LinkAnswer((large,))

        b.calls.register(LINK, LinkQuery, LinkAnswer, lie, max_bytes=1 << 24)
        with pytest.raises(PeerFault):
            await ours.link(peer, 0)

    run_pair(tmp_path, scenario)
