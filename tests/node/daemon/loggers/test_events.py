"""Loggers get what the rows have: each event once, with its own values, and only numbers."""

import math

import pytest

from atoll.node.daemon.loggers.event_files import CsvFile, JsonLinesFile
from atoll.node.daemon.loggers.events import COLUMNS, VALUES, LoggedEvent, RoundEvents, values_of
from atoll.node.daemon.telemetry.round_log import RoundLog
from atoll.protocols.ids import PeerId, Round, digest
from atoll.protocols.local.control_messages import RoundStatus, TimeShares
from atoll.protocols.local.worker_messages import Pending, TrainReply

ME, YOU = PeerId("me"), PeerId("you")


@pytest.fixture
def log(tmp_path):
    log = RoundLog(tmp_path, ME, lambda: 1000.0)
    yield log
    log.close()


def trained(number: int) -> TrainReply:
    pending = Pending(Round(number), digest(b"b"), digest(b"p"), "/p", 5, 640, 64, 2.5)
    return TrainReply(pending, 996, 12.0, 3, 0.5)


def test_a_round_s_events_have_the_values_of_its_row(log):
    events, got = RoundEvents(log.rows), []
    log.listeners.append(lambda name, facts: got.append(events.of(name, facts, 7.0)))
    log.training_started(Round(0))
    log.trained(trained(0), 0)
    log.finalized(Round(0), digest(b"set"), digest(b"state"), [ME, YOU])
    log.evaluated(Round(0), digest(b"state"), 1.5)
    log.add_time(TimeShares(steps_s=3.0, wait_s=1.0), 0.0)
    log.training_started(Round(0))  # its worker died: the round's time goes on
    log.training_started(Round(1))
    log.event("stopping")
    assert [(one.event, one.round) for one in got if one] == [
        ("trained", 0), ("final", 0), ("evaluated", 0), ("spent", 0),
    ]  # fmt: skip
    first, final, evaluated, spent = (one for one in got if one)
    assert first.values == {
        "train_loss": 2.5, "steps": 5, "tokens": 640, "train_s": 12.0, "payload_bytes": 996, "overlapped": 3,
        "held_s": 0.5,
    }  # fmt: skip
    assert final.values == {"contributors": 2}
    assert evaluated.values == {"val_bpb": 1.5}
    assert (spent.values["steps_s"], spent.values["wait_s"], spent.time) == (3.0, 1.0, 7.0)


def test_every_value_is_a_field_of_a_row():
    row = RoundStatus(round=1, peer=ME)
    for names in VALUES.values():
        values_of(row, names)
    assert len(set(COLUMNS)) == len(COLUMNS)


def test_unknown_numbers_and_those_that_json_cannot_hold_are_absent():
    row = RoundStatus(round=1, peer=ME, train_loss=math.nan, steps=3)
    assert values_of(row, ("train_loss", "val_bpb", "steps")) == {"steps": 3.0}


def event(number: int) -> LoggedEvent:
    return LoggedEvent(time=1.0, event="trained", round=number, values={"train_loss": 2.5})


def test_a_torn_line_and_a_table_with_other_columns_stay_readable(tmp_path):
    (tmp_path / "events.jsonl").write_bytes(b'{"time":1}\n{"ti')
    lines = JsonLinesFile(tmp_path, "tiny")
    lines.write(event(4))
    lines.close()
    assert (tmp_path / "events.jsonl").read_text().splitlines()[1:] == [
        '{"ti',
        '{"time":1.0,"event":"trained","round":4,"values":{"train_loss":2.5}}',
    ]
    (tmp_path / "events.csv").write_text("time,loss\n1,2\n")
    for _ in range(2):
        table = CsvFile(tmp_path, "tiny")
        table.write(event(4))
        table.close()
    assert (tmp_path / "events.1.csv").read_text() == "time,loss\n1,2\n"
    head, *rows = (tmp_path / "events.csv").read_text().splitlines()
    assert head.split(",") == ["time", "event", "round", *COLUMNS]
    assert rows == ["1.0,trained,4,2.5" + "," * (len(COLUMNS) - 1)] * 2
