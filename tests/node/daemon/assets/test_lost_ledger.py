"""Whether a feed is lost or has not begun, from what a killed start, a moved file or an older version leaves."""

from contextlib import closing

import pytest

from atoll.node.daemon.assets.feed_recovery import LostFeed, mark_restored, read_mark
from atoll.node.daemon.assets.lost_ledger import NEWEST, has_worked, lost_feed
from atoll.node.daemon.telemetry.round_log import LOG_FILE
from atoll.node.daemon.telemetry.round_rows import RoundRows
from atoll.p2p.ledger.signers import SIGNERS_FILE, Signers
from atoll.p2p.ledger.store import LEDGER_FILE, Ledger
from atoll.protocols.errors import DiskFault
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round, RunId
from atoll.protocols.ledger.records import Leave

RUN = RunId(bytes(32))
IDENTITY = Identity(bytes([1]) * 32)
ME = IDENTITY.peer_id
A, B, C = (Identity(bytes([number]) * 32).peer_id for number in (2, 3, 4))


def started(folder, seen=()):
    """What a start finds."""
    with closing(Ledger(folder / LEDGER_FILE, RUN)) as ledger:
        return lost_feed(folder, ME, ledger, seen)


def signed(folder):
    with closing(Ledger(folder / LEDGER_FILE, RUN)) as ledger:
        ledger.append(IDENTITY, Leave(Round(0)))


def lose(folder):
    for file in folder.glob(f"{LEDGER_FILE}*"):
        file.unlink()


def final_sets(folder, *sets, final=True):
    with closing(RoundRows(folder / LOG_FILE, ME)) as rows:
        for number, authors in enumerate(sets):
            row = rows.open(number)
            row.final, row.contributors = final, tuple(authors)
            rows.save(row)


def test_a_home_that_signed_waits_for_who_it_knows(tmp_path):
    signed(tmp_path)
    assert started(tmp_path) is None
    lose(tmp_path)
    assert has_worked(tmp_path, ME, None), "members have seen its permit"
    assert started(tmp_path, [A, ME]) == LostFeed(1, {A})
    assert started(tmp_path, [A, B]) == LostFeed(1, {A}), "the mark says it now"
    assert read_mark(tmp_path, ME) == LostFeed(1, {A})


def test_a_feed_that_came_back_in_part_is_still_lost(tmp_path):
    signed(tmp_path)
    mark_restored(tmp_path, 2, [A], ME)
    assert started(tmp_path) == LostFeed(2, {A})


@pytest.mark.parametrize("has_ledger", [False, True])
@pytest.mark.parametrize("sets", [(), ([A, B], [A, B])])
def test_who_never_signed_begins_whatever_else_is_there(tmp_path, has_ledger, sets):
    (tmp_path / "epoch").write_text("41\n")
    (tmp_path / "state").mkdir()
    (tmp_path / "events.jsonl").write_text('{"event": "training", "round": 3}\n')
    final_sets(tmp_path, *sets)
    final_sets(tmp_path, [], [], [ME], final=False)
    Signers(tmp_path).note(A)  # another identity of this home
    if has_ledger:
        assert started(tmp_path) is None
    assert not has_worked(tmp_path, ME, None) or has_ledger
    assert started(tmp_path, [A, B]) is None
    assert read_mark(tmp_path, ME) is None


def test_a_final_set_tells_it_where_an_older_version_kept_no_file(tmp_path):
    signed(tmp_path)
    (tmp_path / SIGNERS_FILE).unlink()
    lose(tmp_path)
    final_sets(tmp_path, [ME, A], [A])
    assert started(tmp_path, [C]) == LostFeed(1, {A})


def test_a_start_notes_the_author_of_an_older_version(tmp_path):
    signed(tmp_path)
    (tmp_path / SIGNERS_FILE).unlink()
    assert started(tmp_path) is None
    assert ME in Signers(tmp_path)


def test_who_came_for_a_few_rounds_is_not_waited_for(tmp_path):
    signed(tmp_path)
    lose(tmp_path)
    old = [[ME, C]] * 40
    final_sets(tmp_path, *old, *[[ME, A]] * (NEWEST // 2), *[[ME, A, B]] * (NEWEST // 2 - 1), [ME, A])
    assert started(tmp_path, [B, C]) == LostFeed(1, {A})


def test_a_disk_that_is_full_when_the_first_entry_is_signed_loses_neither(tmp_path, monkeypatch):
    def full(path, data):
        raise DiskFault("no space is left")

    with monkeypatch.context() as disk:
        disk.setattr("atoll.p2p.ledger.signers.write_whole", full)
        signed(tmp_path)
    assert ME not in Signers(tmp_path)
    signed(tmp_path)
    assert ME in Signers(tmp_path), "the next entry noted it"


def test_both_identities_of_a_home_are_noted(tmp_path):
    for author in (ME, A, ME):
        Signers(tmp_path).note(author)
    assert all(author in Signers(tmp_path) for author in (ME, A))
    assert B not in Signers(tmp_path)
