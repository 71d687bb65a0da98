"""`run rm`: deletes what a run has here, only where no node trains it, and never lets a feed begin anew."""

import json
import os
from contextlib import closing

import msgspec
import pytest

from atoll.node.config.home import Home, hold_lock
from atoll.node.daemon.assets.feed_recovery import LostFeed, mark_restored, read_mark
from atoll.node.daemon.telemetry.round_log import LOG_FILE
from atoll.node.daemon.telemetry.round_rows import RoundRows
from atoll.node.import_export import remove_run
from atoll.node.runs.run_files import find_run
from atoll.p2p.ledger.store import LEDGER_FILE, Ledger
from atoll.p2p.system.key_file import load
from atoll.protocols.errors import DiskFault
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round
from atoll.protocols.ledger.records import Leave

OTHER = Identity(bytes([9]) * 32)


@pytest.fixture
def home(atoll, tmp_path) -> Home:
    """With two runs; the first one has a file in its folder."""
    for name, seed in (("tiny", "1"), ("other", "2")):
        assert atoll("run", "new", name, "--data", "synthetic:markov", "--seed", seed).code == 0
    made = Home(tmp_path / "home")
    folder = made.run(find_run(made, "tiny").spec.id)
    (folder / "state").mkdir(parents=True)
    (folder / "state" / "weights").write_bytes(bytes(5000))
    return made


def fed(home: Home, *authors: Identity) -> None:
    """The run's ledger with one entry of each author."""
    run = find_run(home, "tiny").spec.id
    with closing(Ledger(home.run(run) / LEDGER_FILE, run)) as ledger:
        for author in authors:
            ledger.append(author, Leave(Round(0)))


def test_it_says_what_it_deletes_and_how_much_and_deletes_it(atoll, home):
    run = find_run(home, "tiny")
    home.data_path(run.spec.id).write_text("/a/text")
    total = run.path.stat().st_size + 5000 + len("/a/text")
    ran = atoll("run", "rm", "tiny", "--yes")
    assert ran.code == 0
    assert all(str(path) in ran.err for path in (run.path, home.run(run.spec.id), home.data_path(run.spec.id)))
    assert ran.out == f"deleted 3 files with {total / 1000:.3g} kB of tiny\n"
    assert [path.name for path in home.runs.iterdir()] == ["other.run"]
    assert home.identity.exists()
    assert atoll("run", "rm", "tiny", "--yes").code == 78


def test_without_yes_it_asks_and_no_terminal_is_a_no(atoll, home, monkeypatch):
    ran = atoll("run", "rm", "tiny")
    assert ran.code == 78
    assert "stdin is no terminal; give --yes to delete" in ran.err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda _: "n")
    assert atoll("run", "rm", "tiny").code == 1
    assert find_run(home, "tiny").path.exists()
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda _: "y")
    assert atoll("run", "rm", "tiny").code == 0
    assert not home.run_file("tiny").exists()


def test_a_run_that_a_node_trains_is_refused_and_another_one_is_not(atoll, home, daemon):
    trained = find_run(home, "tiny").spec.id.hex()
    daemon.operator.state = msgspec.structs.replace(daemon.operator.state, run=trained)
    with hold_lock(home):
        ran = atoll("run", "rm", "tiny", "--yes")
        assert ran.code == 78
        assert ran.err == "error: a node of this home trains 'tiny' now; `atoll stop --wait` first\n"
        assert json.loads(atoll("run", "rm", "other", "--yes", "--json").out)["name"] == "other"
    assert [path.name for path in sorted(home.runs.glob("*.run"))] == ["tiny.run"]


def test_a_node_that_starts_is_a_node(atoll, home):
    """It has the lock, and answers nobody yet."""
    with hold_lock(home):
        ran = atoll("run", "rm", "tiny", "--yes")
    assert ran.code == 78
    assert "a node already runs in" in ran.err
    assert home.run_file("tiny").exists()


def test_a_feed_that_others_have_leaves_a_mark(atoll, home):
    run, me = find_run(home, "tiny").spec.id, load(home.identity)
    fed(home, me, OTHER)
    ran = atoll("run", "rm", "tiny", "--yes")
    assert "first waits for its own entries from the others" in ran.out
    assert read_mark(home.run(run), load(home.identity).peer_id) == LostFeed(1, frozenset({OTHER.peer_id}))
    assert [path.name for path in home.run(run).iterdir()] == ["restored"]


@pytest.mark.parametrize("authors", [(), (OTHER,), "me"])
def test_a_feed_that_nobody_else_has_leaves_none(atoll, home, authors):
    run = find_run(home, "tiny").spec.id
    fed(home, *((load(home.identity),) if authors == "me" else authors))
    assert json.loads(atoll("run", "rm", "tiny", "--yes", "--json").out)["marked"] is False
    assert not home.run(run).exists()


def test_who_left_for_good_is_not_waited_for_where_final_sets_name_the_members(atoll, home):
    """The ledger has all that ever wrote an entry, strangers too: more than half of them may never come back."""
    run, me = find_run(home, "tiny").spec.id, load(home.identity)
    fed(home, me, OTHER, *(Identity(bytes([number]) * 32) for number in range(20, 40)))
    with closing(RoundRows(home.run(run) / LOG_FILE, me.peer_id)) as rows:
        row = rows.open(0)
        row.final, row.contributors = True, (me.peer_id, OTHER.peer_id)
        rows.save(row)
    atoll("run", "rm", "tiny", "--yes")
    assert read_mark(home.run(run), me.peer_id) == LostFeed(1, frozenset({OTHER.peer_id}))


def test_a_mark_that_is_there_stays(atoll, home):
    run = find_run(home, "tiny").spec.id
    mark_restored(home.run(run), 7, [OTHER.peer_id], load(home.identity).peer_id)
    atoll("run", "rm", "tiny", "--yes")
    assert read_mark(home.run(run), load(home.identity).peer_id) == LostFeed(7, frozenset({OTHER.peer_id}))


def test_a_ledger_that_nobody_can_read_leaves_a_mark(atoll, home):
    run = find_run(home, "tiny").spec.id
    (home.run(run) / LEDGER_FILE).write_bytes(b"nothing" * 1000)
    atoll("run", "rm", "tiny", "--yes")
    assert read_mark(home.run(run), load(home.identity).peer_id) == LostFeed(1, frozenset())


def test_a_ledger_that_was_moved_away_leaves_a_mark(atoll, home):
    run, me = find_run(home, "tiny").spec.id, load(home.identity)
    fed(home, me, OTHER)
    for emptied in (False, True):
        for file in home.run(run).glob(f"{LEDGER_FILE}*"):
            file.unlink()
        if emptied:  # by a command that opens it
            fed(home)
        assert remove_run._feed_in(home, find_run(home, "tiny")) == (me.peer_id, LostFeed(1, frozenset()))
    atoll("run", "rm", "tiny", "--yes")
    assert read_mark(home.run(run), me.peer_id) == LostFeed(1, frozenset())


def test_what_was_interrupted_is_ended_by_the_next_one(atoll, home, monkeypatch):
    run = find_run(home, "tiny").spec.id

    def refuse(path: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(remove_run.shutil, "rmtree", refuse)
        assert atoll("run", "rm", "tiny", "--yes").code == DiskFault.exit_code
    assert not home.run(run).exists(), "nobody finds half of it under its name"
    assert len(os.listdir(home.runs)) == 2
    assert atoll("run", "rm", "other", "--yes").code == 0
    assert os.listdir(home.runs) == []


def test_a_file_outside_the_home_stays(atoll, home, tmp_path):
    moved = home.run_file("tiny").rename(tmp_path / "mine.run")
    assert atoll("run", "rm", str(moved), "--yes").code == 0
    assert moved.exists()
    ran = atoll("run", "rm", str(moved), "--yes")
    assert (ran.code, "this home has nothing of 'tiny'" in ran.err) == (78, True)
