"""A ledger without its old records: feeds with floors, a summary, all or nothing, and a file that stays small."""

import contextlib
import sqlite3
from functools import partial
from pathlib import Path

import pytest

from atoll.p2p.ledger import database
from atoll.p2p.ledger.history import Cut
from atoll.p2p.ledger.shares import Quota
from atoll.p2p.ledger.store import CLOSED, LEDGER_FILE, Ledger
from atoll.protocols.errors import CorruptFault, DiskFault, LocalFault
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round, RunId, digest
from atoll.protocols.ledger.records import Ack, Entry, Follow, decode_entry, sign_entry

RUN = RunId(digest(b"run"))
ME, OTHER, IDLE = (Identity(bytes([number]) * 32) for number in range(1, 4))


def ack(number: int, what: bytes = b"") -> Ack:
    return Ack(Round(number), digest(b"set"), digest(b"state", what))


def feed(author: Identity, rounds: int, what: bytes = b"") -> list[Entry]:
    """An entry a round; in round 1 its author follows an epoch."""
    entries: list[Entry] = []
    for seq in range(rounds):
        body = Follow(Round(1), b"") if seq == 1 else ack(seq, what)
        entries.append(sign_entry(RUN, author, seq, entries[-1].id if entries else b"", body))
    return entries


@pytest.fixture
def ledger(tmp_path: Path):
    opened = Ledger(tmp_path / LEDGER_FILE, RUN)
    for entry in feed(ME, 6):
        opened.append(ME, entry.body)
    opened.insert_all([*feed(OTHER, 6), *feed(IDLE, 1)])
    yield opened
    opened.close()


def rounds_of(ledger: Ledger, author: Identity) -> list[int]:
    return [entry.body.round for entry in ledger.entries(author=author.peer_id)]


def test_a_cut_keeps_newer_rounds_heads_and_what_changes_who_decides(ledger: Ledger) -> None:
    before = ledger.vector()
    ledger.cut(Cut(b"summary", last=3))
    assert rounds_of(ledger, ME) == rounds_of(ledger, OTHER) == [1, 4, 5]
    assert rounds_of(ledger, IDLE) == [0], "its next entry is linked to it"
    assert (ledger.vector(), ledger.history.summary) == (before, b"summary")
    assert ledger.history.floors == {ME.peer_id: 4, OTHER.peer_id: 4}
    ledger.cut(Cut(b"later", last=3))
    assert ledger.history.floors == {ME.peer_id: 4, OTHER.peer_id: 4}


def test_rounds_at_which_an_epoch_begins_stay(ledger: Ledger) -> None:
    ledger.cut(Cut(b"summary", last=3, forks=(2,)))
    assert rounds_of(ledger, ME) == [1, 2, 4, 5]
    assert ledger.history.floor(ME.peer_id) == 4


def test_a_cut_ledger_is_the_same_after_a_start_and_goes_on(ledger: Ledger, tmp_path: Path) -> None:
    ledger.cut(Cut(b"summary", last=3))
    ledger.close()
    again = Ledger(tmp_path / LEDGER_FILE, RUN)
    assert (again.history.summary, again.history.floor(OTHER.peer_id)) == (b"summary", 4)
    head = again.head(ME.peer_id)
    assert head is not None
    assert again.append(ME, ack(6)).previous == head.id
    more = feed(OTHER, 8)
    assert again.insert_all(more).fresh == tuple(more[6:]), "old entries are known, new ones are stored"
    again.close()


def test_what_is_gone_is_not_offered_and_what_is_here_is(ledger: Ledger) -> None:
    ledger.cut(Cut(b"summary", last=3))
    found = [decode_entry(data, RUN) for data in ledger.missing({ME.peer_id: 4, OTHER.peer_id: 3}, 1 << 20)]
    assert [(entry.author, entry.seq) for entry in found] == [(ME.peer_id, 4), (ME.peer_id, 5), (IDLE.peer_id, 0)]


def test_two_histories_show_above_the_floor(ledger: Ledger) -> None:
    ledger.cut(Cut(b"summary", last=3))
    other = feed(OTHER, 8, b"another")
    gone = [entry for entry in other[:4] if entry.seq != 1]
    assert not ledger.insert_all(gone).forks, "what is gone contradicts nothing"
    (fork,) = ledger.insert_all(other[4:]).forks
    assert fork.author == OTHER.peer_id
    assert [decode_entry(data, RUN).seq for data in ledger.proof(OTHER.peer_id) or ()] == [4, 4]
    assert ledger.wanted()[OTHER.peer_id] == CLOSED


def test_a_disk_that_refuses_leaves_all_records(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    write = ledger._db.write

    def refuse(statement: str, *values: object) -> int:
        if "summary" in values:
            raise DiskFault("full")
        return write(statement, *values)

    monkeypatch.setattr(ledger._db, "write", refuse)
    with pytest.raises(DiskFault):
        ledger.cut(Cut(b"summary", last=3))
    monkeypatch.undo()
    assert (ledger.history.summary, ledger.history.floors) == (None, {})
    assert rounds_of(ledger, ME) == list(range(6))


def test_a_full_ledger_can_be_opened_and_cut(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / LEDGER_FILE, RUN, Quota(disk_bytes=40 * 4096))
    with contextlib.suppress(DiskFault):
        while True:
            ledger.append(ME, ack(len(ledger.entries())))
    last = ledger.vector()[ME.peer_id] - 1
    ledger.close()
    again = Ledger(tmp_path / LEDGER_FILE, RUN, Quota(disk_bytes=40 * 4096))
    again.cut(Cut(bytes(5000), last - 5))
    assert rounds_of(again, ME) == list(range(last - 4, last + 1))
    again.append(ME, ack(last + 1))
    again.close()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE meta SET value = CAST(value || 'x' AS BLOB) WHERE name = 'summary'",
        f"DELETE FROM entries WHERE seq = 4 AND author = '{OTHER.peer_id}'",
        f"UPDATE meta SET value = 3 WHERE name = 'floor/{OTHER.peer_id}'",
    ],
)
def test_damage_of_the_summary_and_gaps_above_the_floor_are_found(
    ledger: Ledger, tmp_path: Path, damage: str
) -> None:
    ledger.cut(Cut(b"summary", last=3))
    ledger.close()
    file = sqlite3.connect(tmp_path / LEDGER_FILE, isolation_level=None)
    file.execute(damage)
    file.close()
    with pytest.raises(CorruptFault):
        Ledger(tmp_path / LEDGER_FILE, RUN)


def test_a_feed_that_was_cut_has_room_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / LEDGER_FILE, RUN, Quota(author_bytes=1500))
    while ledger.wanted().get(ME.peer_id) != CLOSED:
        ledger.append(ME, ack(1))
    with pytest.raises(LocalFault, match="full"):
        ledger.append(ME, ack(1))
    ledger.cut(Cut(b"summary", last=19))
    ledger.append(ME, ack(9))
    ledger.close()


def test_the_file_does_not_grow_and_a_start_gives_the_disk_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(tmp_path / LEDGER_FILE, RUN)
    sizes = []
    for number in range(600):
        ledger.append(ME, ack(number))
        if number >= 300 and not number % 20:
            ledger.cut(Cut(bytes(500), last=number - 200))
        sizes.append(ledger._db.rows("PRAGMA page_count")[0][0])
    assert sizes[-1] <= sizes[320] + 2, "free pages are used again"
    ledger.cut(Cut(bytes(500), last=598))
    ledger.close()
    monkeypatch.setattr(database, "_VACUUM_PAGES", 16)
    again = Ledger(tmp_path / LEDGER_FILE, RUN)
    assert again._db.rows("PRAGMA page_count")[0][0] < sizes[-1] / 3
    assert rounds_of(again, ME) == [599]
    again.close()


def test_a_cut_below_floors_leaves_each_feed_whole_from_its_floor_on(ledger: Ledger) -> None:
    mine, theirs = ledger.entries(author=ME.peer_id), ledger.entries(author=OTHER.peer_id)
    before = ledger.vector()
    floors = {ME.peer_id: mine[4].id, OTHER.peer_id: theirs[2].id, IDLE.peer_id: digest(b"of another history")}
    ledger.cut(Cut(b"summary", 3, (), floors))
    assert rounds_of(ledger, ME) == [1, 4, 5]
    assert rounds_of(ledger, OTHER) == [1, 2, 3, 4, 5], "also of rounds that are gone"
    assert rounds_of(ledger, IDLE) == [0], "an entry that is not here is no floor"
    assert (ledger.vector(), ledger.history.summary) == (before, b"summary")
    assert ledger.history.floors == {ME.peer_id: 4, OTHER.peer_id: 2}
    assert len(ledger.missing({ME.peer_id: 4, OTHER.peer_id: 2}, 1 << 20)) == 2 + 4 + 1


def test_what_outlives_a_cut_is_known_before_it_and_the_same_after_it(ledger: Ledger) -> None:
    entries = ledger.entries(author=ME.peer_id)
    find = partial(ledger.history.below, ME.peer_id, 0)
    before = find(4, 2, (0,))
    assert [(each.round, each.is_lasting) for each in before] == [(0, False), (1, True), (3, False)]
    assert [each.id for each in before] == [entries[0].id, entries[1].id, entries[3].id]
    assert [each.stays(3, ()) for each in before] == [False, True, False]
    ledger.cut(Cut(b"summary", 2, (0,), {ME.peer_id: entries[4].id}))
    assert find(4, 2, (0,)) == before
    assert find(5, 3, ()) == [before[1], (entries[4].id, 4, False)]
    assert ledger.history.place_of(entries[4].id) == 4
    assert ledger.history.place_of(entries[2].id) is None
