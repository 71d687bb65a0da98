"""The newest lines of a log and of a journal, for readers that come back."""

import json
from pathlib import Path

import msgspec
import pytest

from atoll.node.daemon.telemetry import log_ring as module
from atoll.node.daemon.telemetry.log_ring import (
    EVENTS,
    FACTS_MAX,
    LINES,
    MESSAGE_MAX,
    ROUTINE,
    event_ring,
    log_ring,
)
from atoll.protocols.local.control_messages import LogLine


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "node.log"


def write(path: Path, *messages: str) -> None:
    with path.open("ab") as file:
        for message in messages:
            file.write(msgspec.json.encode(LogLine("2026", "info", "atoll.x", message)) + b"\n")


def messages(found: tuple[int, list[LogLine]]) -> list[str]:
    return [line.message for line in found[1]]


def test_a_reader_that_comes_back_gets_what_is_new(path):
    ring = log_ring(path)
    assert ring.news(0) == (0, ())
    write(path, "one", "two")
    count, _ = found = ring.news(0)
    assert (count, messages(found)) == (2, ["one", "two"])
    write(path, "three")
    assert messages(ring.news(count)) == ["three"]
    assert messages(ring.news(3)) == []
    assert messages(ring.news(0)) == ["one", "two", "three"], "another reader"
    assert messages(ring.news(99)) == ["one", "two", "three"], "a reader of another daemon's count"


def test_it_is_bounded(path, monkeypatch):
    monkeypatch.setattr(module, "START_BYTES", 8000)
    write(path, *map(str, range(1000)))
    ring = log_ring(path)
    first = messages(ring.news(0))
    assert 10 < len(first) <= LINES
    assert first[-1] == "999"
    write(path, *["x"] * (LINES + 50), "y" * (2 * MESSAGE_MAX))
    count, _ = found = ring.news(0)
    assert messages(found)[-1] == "y" * MESSAGE_MAX, "the newest line is there at once"
    assert len(messages(found)) <= LINES
    assert count < len(first) + LINES


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def happen(journal: Path, *names: str, **facts) -> None:
    with journal.open("a") as file:
        for name in names:
            file.write(json.dumps({"time": 12.5, "event": name, **facts}) + "\n")


def test_events_without_what_happens_in_every_round(journal):
    ring = event_ring(journal)
    assert ring.news(0) == (0, ())
    happen(journal, "training", "final", *ROUTINE, round=3)
    happen(journal, "joined", peers=["a", "b"], count=2)
    count, events = ring.news(0)
    assert [(one.unix_s, one.event, one.text) for one in events] == [
        (12.5, "final", "round=3"),
        (12.5, "joined", "peers=['a', 'b'] count=2"),
    ]
    assert ring.news(count) == (2, ())


def test_events_are_few_and_short(journal):
    happen(journal, *["final"] * (EVENTS + 10))
    happen(journal, "left", peers="p" * 9999)
    count, events = event_ring(journal).news(0)
    assert (count, len(events)) == (EVENTS, EVENTS)
    assert (events[-1].event, len(events[-1].text)) == ("left", FACTS_MAX)


@pytest.mark.parametrize(
    "line",
    [
        b"{", b"[]", b"7", b"{}", b"\xff\xfe", b'{"time":1}', b'{"time":"x","event":"final"}',
        b'{"time":1,"event":7}', b'{"time":1e300,"event":"final"}', b'{"time":-1,"event":"final"}',
    ],
)  # fmt: skip
def test_a_line_that_is_no_event_is_left_out(journal, line):
    journal.write_bytes(line + b"\n")
    happen(journal, "final")
    assert [one.event for one in event_ring(journal).news(0)[1]] == ["final"]
