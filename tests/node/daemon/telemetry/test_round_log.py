"""The round log: rows survive a restart and torn lines, files stay bounded, a bad disk never stops a node."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.node.daemon.telemetry import logfile, round_rows
from atoll.node.daemon.telemetry.logfile import LogTail
from atoll.node.daemon.telemetry.round_log import RoundLog, TrafficTotals, newest_rows, sent_per_round
from atoll.protocols.errors import DiskFault
from atoll.protocols.ids import PeerId, Round, digest
from atoll.protocols.ledger.registers import Validation
from atoll.protocols.local.control_messages import RoundStatus, SentPerRound, TimeShares
from atoll.protocols.local.worker_messages import Pending, StartReply, TrainReply

ME, YOU = PeerId("me"), PeerId("you")
NOBODY = TrafficTotals(0, 0, 0, 0, 0)


@pytest.fixture
def opened() -> Iterator[Callable[[Path], RoundLog]]:
    """Opens logs, and closes them at the end."""
    logs: list[RoundLog] = []

    def one(folder: Path) -> RoundLog:
        logs.append(RoundLog(folder, ME, lambda: 1000.0))
        return logs[-1]

    yield one
    for log in logs:
        log.close()


def trained(number: int) -> TrainReply:
    pending = Pending(Round(number), digest(b"b"), digest(b"p"), "/p", 5, 640, 64, 2.5)
    return TrainReply(pending, 996, 12.0, 3, 0.5)


def events(folder: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (folder / "events.jsonl").read_text().splitlines()]


def test_tokens_are_counted_since_the_start(opened, tmp_path):
    log = opened(tmp_path)
    for number in (0, 1, 1):  # the worker died after the second round, and trained it again
        log.training_started(Round(number))
        log.trained(trained(number), 0)
    assert log.tokens == 3 * 640
    log.close()
    assert opened(tmp_path).tokens == 0


def test_a_round_is_written_as_it_happens_and_read_back(opened, tmp_path):
    log = opened(tmp_path)
    log.training_started(Round(0))
    log.trained(trained(0), 5)
    log.closed(Round(0), digest(b"set"), digest(b"view"), [YOU, ME], TrafficTotals(100, 200, 30, 20, 0))
    log.evaluated(Round(0), digest(b"view"), 3.25)
    log.add_time(TimeShares(steps_s=11.0, wait_s=3.0, fold_s=1.0), 0.0)
    log.training_started(Round(1))
    log.add_time(TimeShares(steps_s=5.0), 0.0)
    log.finalized(Round(0), digest(b"set"), digest(b"view"), [YOU, ME])
    log.close()
    row = opened(tmp_path).rows[0]
    assert (row.train_loss, row.steps, row.tokens, row.payload_bytes) == (2.5, 5, 640, 996)
    assert (row.train_s, row.steps_s, row.wait_s, row.fold_s, row.val_bpb) == (12.0, 11.0, 3.0, 1.0, 3.25)
    assert (row.overlap_allowed, row.overlapped, row.held_s) == (5, 3, 0.5)
    assert (row.bytes_up, row.bytes_down, row.blob_bytes_up, row.blob_payload_up) == (100, 200, 30, 20)
    assert (row.final, row.digest, row.contributors) == (True, digest(b"view").hex(), ("me", "you"))
    assert events(tmp_path) == ["training", "trained", "closed", "evaluated", "training", "final"]


def test_time_goes_to_the_newest_round_that_was_begun_and_survives_a_good_end(opened, tmp_path):
    log = opened(tmp_path)
    log.add_time(TimeShares(start_s=9.0), 0.0)
    assert log.rows == {}, "nothing was trained yet"
    log.training_started(Round(4))
    log.add_time(TimeShares(steps_s=2.0, down_s=1.0), 0.0)
    log.add_time(TimeShares(steps_s=3.0), 0.0)
    log.close()
    row = opened(tmp_path).rows[4]
    assert (row.steps_s, row.down_s, row.start_s) == (5.0, 1.0, 0.0)


def test_lost_steps_are_booked_where_they_were_made(opened, tmp_path):
    """The newer round that took the place of round 0 has begun when the worker says what was lost."""
    log = opened(tmp_path)
    log.training_started(Round(0))
    log.add_time(TimeShares(steps_s=6.0), 0.0)
    log.training_started(Round(1))
    log.add_time(TimeShares(wait_s=1.0), 6.0)
    assert (log.rows[0].steps_s, log.rows[0].recompute_s) == (0.0, 6.0)
    assert (log.rows[1].steps_s, log.rows[1].recompute_s, log.rows[1].wait_s) == (0.0, 0.0, 1.0)


def test_steps_before_a_restart_of_the_same_round_were_in_vain(opened, tmp_path):
    log = opened(tmp_path)
    log.training_started(Round(0))
    log.add_time(TimeShares(steps_s=6.0), 0.0)
    log.close()
    again = opened(tmp_path)
    again.training_started(Round(0))
    again.add_time(TimeShares(steps_s=12.0), 0.0)
    again.trained(trained(0), 5)
    assert (again.rows[0].steps_s, again.rows[0].recompute_s) == (12.0, 6.0)
    assert again.newest_payload == (0, 996)


def test_lines_of_older_versions_load(opened, tmp_path):
    (tmp_path / "rounds.jsonl").write_text(
        '{"round": 3, "peer": "me", "train_s": 9.5, "encode_s": 0.5, "wait_s": 2.0, "payload_bytes": 996}\n'
    )
    row = opened(tmp_path).rows[3]
    assert (row.train_s, row.encode_s, row.wait_s, row.steps_s, row.transfer_s) == (9.5, 0.5, 2.0, 0.0, 0.0)


def test_bytes_are_counted_for_the_round_in_which_they_moved(opened, tmp_path):
    log = opened(tmp_path)
    log.closed(Round(0), digest(b"s"), digest(b"v"), [ME], TrafficTotals(10, 1, 0, 0, 0))
    log.closed(Round(1), digest(b"s"), digest(b"v"), [ME], TrafficTotals(25, 3, 0, 0, 0))
    log.closed(Round(0), digest(b"t"), digest(b"w"), [ME, YOU], TrafficTotals(26, 3, 0, 0, 0))
    assert (log.rows[0].bytes_up, log.rows[1].bytes_up) == (11, 15)


def test_a_round_and_a_copy_are_told_apart():
    """Of three nodes each sends its payload to two others: a round is two copies and some records."""
    row = {"peer": "me", "digest": "aa", "payload_bytes": 20_000, "blob_payload_up": 40_000}
    busy = RoundStatus(round=0, bytes_up=44_000, blob_bytes_up=40_120, **row)
    calm = RoundStatus(round=1, bytes_up=40_000, blob_bytes_up=40_120, **row)
    open_round = RoundStatus(round=2, peer="me", payload_bytes=20_000)
    away = RoundStatus(round=3, peer="me", digest="aa", bytes_up=10**9)
    sent = sent_per_round([busy, calm, open_round, away], 2_226_000)
    assert sent == SentPerRound(bytes=42_000, payloads=2.1, below_fp32=53, per_copy=1.003)
    assert sent_per_round([open_round, away], 2_226_000) is None
    assert sent_per_round([], 1) is None


def test_a_final_row_keeps_its_digest_and_is_written_once(opened, tmp_path):
    log = opened(tmp_path)
    for _ in range(3):
        log.finalized(Round(0), digest(b"s"), digest(b"final"), [ME])
    log.closed(Round(0), digest(b"s"), digest(b"view"), [ME], NOBODY)
    assert log.rows[0].digest == digest(b"final").hex()
    assert events(tmp_path).count("final") == 1


def test_what_is_final_is_told_from_what_only_closed(opened, tmp_path):
    log = opened(tmp_path)
    assert (log.newest_final(), log.newest_of(digest(b"v"))) == (None, None)
    log.finalized(Round(0), digest(b"s"), digest(b"final"), [ME])
    for number, state in ((1, b"v"), (2, b"w")):
        log.closed(Round(number), digest(b"s"), digest(state), [ME], NOBODY)
    assert log.newest_final().round == 0
    assert log.newest_of(digest(b"v")).round == 1, "an evaluation is of the view that it saw"
    assert log.newest_of(digest(b"final")).round == 0
    assert log.newest_of(digest(b"other")).round == 2
    assert [row.round for row in newest_rows(tmp_path / "rounds.jsonl")] == [0, 1, 2]
    assert [row.final for row in newest_rows(tmp_path / "rounds.jsonl")] == [True, False, False]


def test_rounds_of_a_chain_that_was_left_are_open_again(opened, tmp_path):
    """Another chain decides them anew; until then this node knows of no final state there."""
    log = opened(tmp_path)
    for number in range(6):
        log.folded(Round(number), digest(b"state", bytes([number])))
        log.finalized(Round(number), digest(b"s"), digest(b"state", bytes([number])), [ME])
    log.folded(Round(5), digest(b"another"))
    started = StartReply(final=-1, state=digest(b""), pending=(), parameters=1, device="cpu", settled=3)
    log.chain_changed(started, [])
    assert log.newest_final().round == 3
    assert log.newest_final().digest
    assert [log.rows[number].digest for number in (4, 5)] == ["", ""]
    assert [log.rows[number].own_digest for number in (4, 5)] == ["", digest(b"another").hex()]
    assert [row.final for row in newest_rows(tmp_path / "rounds.jsonl")] == [True] * 4 + [False] * 2


def found(log, number: int, val_bpb: float) -> None:
    """The round closes, and its state is validated."""
    log.closed(Round(number), digest(b"set"), digest(b"view"), [ME], TrafficTotals(0, 0, 0, 0, 0))
    log.evaluated(Round(number), digest(b"view"), val_bpb)


def test_torn_and_foreign_lines_are_skipped(opened, tmp_path):
    log = opened(tmp_path)
    found(log, 0, 3.0)
    found(log, 1, 2.0)
    log.close()
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write('{"round": [1], "peer": "x"}\n[]\nnot json\n{"round": 2, "peer": "x", "unknown')
    again = opened(tmp_path)
    assert sorted(again.rows) == [0, 1]
    assert again.newest_validated().val_bpb == 2.0


def test_a_file_of_repeated_rows_is_written_anew(opened, tmp_path):
    log = opened(tmp_path)
    for at in range(500):
        found(log, at % 2, float(at))
    log.close()
    again = opened(tmp_path)
    again.close()
    assert len((tmp_path / "rounds.jsonl").read_text().splitlines()) == 2
    assert [row.val_bpb for _, row in sorted(again.rows.items())] == [498.0, 499.0]


def test_a_long_journal_is_set_aside_at_the_next_start(opened, tmp_path, monkeypatch):
    for at in range(3):
        monkeypatch.setattr(logfile, "JOURNAL_BYTES", 9999)
        log = opened(tmp_path)
        for _ in range(5):
            log.event(f"start_{at}")
        log.close()
        monkeypatch.setattr(logfile, "JOURNAL_BYTES", 100)
        opened(tmp_path).close()
        assert events(tmp_path) == []
    assert "start_2" in (tmp_path / "events.1.jsonl").read_text()


def test_a_long_journal_is_set_aside_while_the_node_runs(opened, tmp_path, monkeypatch):
    """A node runs for months. What another reads of it is whole, and goes on where it was."""
    monkeypatch.setattr(logfile, "JOURNAL_BYTES", 1000)
    log, tail, seen = opened(tmp_path), LogTail(tmp_path / "events.jsonl"), []
    for at in range(300):
        log.event("final", round=at)
        if at % 8 == 0:
            seen += tail.fresh_bytes()
    seen += tail.fresh_bytes()
    assert [json.loads(line)["round"] for line in seen] == [*range(300)]
    assert {path.name for path in tmp_path.iterdir()} == {"rounds.jsonl", "events.jsonl", "events.1.jsonl"}
    for name in ("events.jsonl", "events.1.jsonl"):
        assert (tmp_path / name).stat().st_size < 1100
        assert (tmp_path / name).read_text().endswith("}\n")


def test_a_journal_that_cannot_be_set_aside_goes_on(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(logfile, "JOURNAL_BYTES", 1000)
    log = opened(tmp_path)
    (tmp_path / "events.1.jsonl").mkdir()
    for at in range(100):
        log.event("final", round=at)
    assert len(events(tmp_path)) == 100


def test_the_end_of_a_node_is_in_one_journal(opened, tmp_path, monkeypatch):
    """`stop --wait` reads the newest lines, and what was not saved comes after the line of the stop."""
    monkeypatch.setattr(logfile, "JOURNAL_BYTES", 1000)
    log = opened(tmp_path)
    for at in range(10):
        log.event("final", round=at)
    log.event("stopping")
    for at in range(100):
        log.event("kept", round=at)
    log.event("not_saved", error="disk")
    assert {"stopping", "not_saved"} <= {*events(tmp_path)}


@pytest.mark.parametrize("fault", ["equivocation", "peer_fault"])
def test_few_lines_are_written_about_the_faults_of_others(opened, tmp_path, fault):
    """Each voter could write thousands in a round, and identities that are made up have no end."""
    now, heard = [7200.0], []
    log = RoundLog(tmp_path, ME, lambda: now[0])
    log.listeners.append(lambda name, facts: heard.append(name))
    for _ in range(50):
        log.event(fault, round=1, peer=ME)
    assert events(tmp_path) == [fault] * logfile.LINES_OF_ONE == heard
    for at in range(500):
        log.event(fault, round=1, peer=f"made-up-{at}")
    assert events(tmp_path) == [fault] * logfile.LINES_OF_ALL == heard
    now[0] += 3600
    log.event("final", round=1)
    log.event(fault, round=1, peer=ME)
    assert events(tmp_path)[-3:] == [f"{fault}s_left_out", "final", fault]
    left = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[-3])["lines"]
    assert left + logfile.LINES_OF_ALL == 550
    for _ in range(logfile.LINES_OF_ONE):
        log.event(fault, round=1, peer=ME)
    log.close()
    assert json.loads((tmp_path / "events.jsonl").read_text().splitlines()[-1])["lines"] == 1


def test_memory_is_bounded(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(round_rows, "KEEP_ROWS", 10)
    monkeypatch.setattr(round_rows, "HELD_ROWS", 4)
    log = opened(tmp_path)
    for number in range(30):
        found(log, number, float(number))
    for now in (log, opened(tmp_path)):
        assert [row.round for row in now.rows.held()] == [29, 28, 27, 26]
        assert [(at, row.val_bpb) for at, row in now.rows.items()] == [(at, float(at)) for at in range(20, 30)]


def test_a_row_that_left_the_memory_can_still_change(opened, tmp_path, monkeypatch):
    """After a restart all rounds are said to be final again; another chain decides old ones anew."""
    monkeypatch.setattr(round_rows, "HELD_ROWS", 4)
    log = opened(tmp_path)
    for number in range(20):
        found(log, number, 3.0)
        log.finalized(Round(number), digest(b"set"), digest(b"view"), [ME, YOU])
    lines = len((tmp_path / "rounds.jsonl").read_bytes().splitlines())
    for number in range(20):
        log.finalized(Round(number), digest(b"set"), digest(b"view"), [ME, YOU])
    assert len((tmp_path / "rounds.jsonl").read_bytes().splitlines()) == lines, "written once"
    log.finalized(Round(3), digest(b"other set"), digest(b"other"), [ME])
    for now in (log, opened(tmp_path)):
        assert [row.val_bpb for row in now.rows.values()] == [3.0] * 3 + [None] + [3.0] * 16
        assert (now.rows[3].contributors, now.rows[4].contributors) == (("me",), ("me", "you"))
    log.finalized(Round(100), digest(b"set"), digest(b"leap"), [ME])
    assert sorted(log.rows) == [*range(20), 100]


def test_the_newest_row_of_a_kind_is_known_after_it_left_the_memory(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(round_rows, "HELD_ROWS", 4)
    log = opened(tmp_path)
    found(log, 0, 2.5)
    log.finalized(Round(0), digest(b"set"), digest(b"view"), [ME])
    for number in range(1, 20):
        log.closed(Round(number), digest(b"set"), digest(b"view"), [ME], NOBODY)
    for now in (log, opened(tmp_path)):
        assert (now.newest_final().round, now.newest_validated().val_bpb) == (0, 2.5)
        assert (now.newest_of(digest(b"another")).round, now.newest_trained()) == (19, None)
    log.finalized(Round(0), digest(b"set"), digest(b"other"), [ME])
    log.closed(Round(20), digest(b"set"), digest(b"view"), [ME], NOBODY)
    assert log.newest_validated() is None, "its state is another one"
    assert log.newest_final().digest == digest(b"other").hex()


def test_the_time_of_a_round_that_is_trained_for_long_is_not_lost(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(round_rows, "HELD_ROWS", 4)
    log = opened(tmp_path)
    log.training_started(Round(0))
    for number in range(1, 20):
        log.add_time(TimeShares(steps_s=1.0), 0.0)
        log.closed(Round(number), digest(b"set"), digest(b"view"), [ME], NOBODY)
    log.close()
    assert opened(tmp_path).rows[0].steps_s == 19.0


def test_a_line_that_the_disk_cut_off_spoils_no_other(opened, tmp_path):
    log = opened(tmp_path)
    found(log, 0, 1.0)
    log.close()
    with (tmp_path / "rounds.jsonl").open("ab") as file:
        file.write(b'{"round":1,"pe')
    log = opened(tmp_path)
    found(log, 1, 2.0)
    found(log, 2, 3.0)
    assert [row.val_bpb for row in newest_rows(tmp_path / "rounds.jsonl")] == [1.0, 2.0, 3.0]
    assert [row.val_bpb for row in opened(tmp_path).rows.values()] == [1.0, 2.0, 3.0]


def test_rows_share_the_names_of_members(opened, tmp_path):
    log = opened(tmp_path)
    for number in range(3):
        authors = [PeerId(f"{name} of a hundred members") for name in ("b", "a")]
        log.finalized(Round(number), digest(b"set"), digest(b"state"), authors)
    for found in (log, opened(tmp_path)):
        rows = [found.rows[number].contributors for number in range(3)]
        assert rows[0] == ("a of a hundred members", "b of a hundred members")
        assert all(one is other for row in rows for one, other in zip(row, rows[0], strict=True))


def test_a_disk_that_refuses_lines_does_not_stop_the_node(opened, tmp_path):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    (tmp_path / "events.jsonl").symlink_to(full)
    log = opened(tmp_path)
    log.event("anything", big="x" * 100_000)
    found(log, 0, 1.0)
    assert log.newest_validated().val_bpb == 1.0
    log.close()


@pytest.mark.parametrize(("event", "is_lost"), [("failed", True), ("not_saved", True), ("stopping", False)])
def test_a_fault_at_the_end_that_the_disk_refuses_is_said_to_be_lost(opened, tmp_path, event, is_lost):
    full, lost = Path("/dev/full"), []
    if not full.exists():
        pytest.skip("no /dev/full here")
    (tmp_path / "events.jsonl").symlink_to(full)
    log = opened(tmp_path)
    log.on_closed = lost.append
    log.event(event, error="the disk is full")
    assert not lost, "it may have room until the end"
    log.close()
    assert lost == [is_lost]


def test_a_fault_at_the_end_that_was_written_is_not_lost(opened, tmp_path):
    log, lost = opened(tmp_path), []
    log.on_closed = lost.append
    log.event("failed", error="the disk is full")
    log.close()
    assert lost == [False]


def test_a_fault_at_the_end_is_lost_where_the_journal_cannot_be_made_again(opened, tmp_path):
    (tmp_path / "run").mkdir()
    log, lost = opened(tmp_path / "run"), []
    log.on_closed = lost.append
    shutil.rmtree(tmp_path / "run")
    log.event("failed", error="the folder is gone")
    log.close()
    assert lost == [True]


def test_files_that_somebody_deletes_while_the_node_runs_are_made_again(opened, tmp_path, monkeypatch):
    """The journal begins again; the rows are whole, those that left the memory too."""
    monkeypatch.setattr(round_rows, "HELD_ROWS", 2)
    log = opened(tmp_path)
    for number in range(5):
        log.training_started(Round(number))
        log.trained(trained(number), 0)
    for name in ("events.jsonl", "rounds.jsonl"):
        (tmp_path / name).unlink()
    log.training_started(Round(5))
    log.trained(trained(5), 0)
    log.close()
    assert events(tmp_path)[:1] == ["training"]
    assert [row.round for row in newest_rows(tmp_path / "rounds.jsonl")] == [*range(6)]
    assert [*opened(tmp_path).rows] == [*range(6)]


def test_a_folder_that_somebody_deletes_does_not_stop_the_node(opened, tmp_path):
    (tmp_path / "run").mkdir()
    log = opened(tmp_path / "run")
    log.training_started(Round(0))
    for name in ("events.jsonl", "rounds.jsonl"):
        (tmp_path / "run" / name).unlink()
    (tmp_path / "run").rmdir()
    log.trained(trained(0), 0)
    log.event("still_here")
    assert log.rows[0].payload_bytes == 996


def test_a_folder_that_is_none_is_a_disk_fault(opened, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskFault):
        opened(tmp_path / "file")


def test_a_fold_of_a_chain_that_was_left_says_nothing_about_the_other_one(opened, tmp_path):
    """And one that differed from its own chain's certificate is a divergence, and stays one."""
    log = opened(tmp_path)
    for number, own in ((0, b"final"), (1, b"diverged")):
        log.folded(Round(number), digest(own))
        log.finalized(Round(number), digest(b"final set"), digest(b"final"), [ME])
        log.finalized(Round(number), digest(b"set of the other chain"), digest(b"other"), [ME])
    log.folded(Round(2), digest(b"other"))
    log.finalized(Round(2), digest(b"set"), digest(b"other"), [ME])
    assert [log.rows[number].own_digest for number in range(3)] == [
        "",
        digest(b"diverged").hex(),
        digest(b"other").hex(),
    ]


def test_what_others_found_is_taken_over_for_the_same_state_and_never_over_an_own_value(opened, tmp_path):
    log = opened(tmp_path)
    for number in range(2):
        log.closed(Round(number), digest(b"set"), digest(b"view"), [YOU, ME], TrafficTotals(0, 0, 0, 0, 0))
    log.validated_by(YOU, Validation(Round(0), digest(b"other"), 3.0))
    log.validated_by(YOU, Validation(Round(7), digest(b"view"), 3.0))
    assert log.newest_validated() is None
    log.validated_by(YOU, Validation(Round(0), digest(b"view"), 3.0))
    log.evaluated(Round(1), digest(b"view"), 2.5)
    log.validated_by(YOU, Validation(Round(1), digest(b"view"), 2.6))
    assert [(row.val_bpb, row.val_by) for row in log.rows.values()] == [(3.0, YOU), (2.5, "")]
    log.evaluated(Round(0), digest(b"view"), 3.1)
    assert (log.rows[0].val_bpb, log.rows[0].val_by) == (3.1, "")


def test_a_loss_is_booked_to_its_own_state_alone(opened, tmp_path):
    """A set that grew, another chain: the round's state is another one, and what was found says nothing of it."""
    log = opened(tmp_path)
    found(log, 0, 3.0)
    log.closed(Round(0), digest(b"larger set"), digest(b"larger"), [ME, YOU], TrafficTotals(0, 0, 0, 0, 0))
    assert log.newest_validated() is None
    log.evaluated(Round(0), digest(b"view"), 3.0)
    log.evaluated(Round(1), digest(b"view"), 3.0)
    assert log.newest_validated() is None
    log.evaluated(Round(0), digest(b"larger"), 2.0)
    log.finalized(Round(0), digest(b"larger set"), digest(b"larger"), [ME, YOU])
    assert log.newest_validated().val_bpb == 2.0
    log.finalized(Round(0), digest(b"set"), digest(b"view"), [ME])
    assert opened(tmp_path).newest_validated() is None
