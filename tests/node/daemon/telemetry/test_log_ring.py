"""The newest lines of a log, for readers that come back."""

from pathlib import Path

import msgspec
import pytest

from atoll.node.daemon.telemetry import log_ring
from atoll.node.daemon.telemetry.log_ring import LINES, MESSAGE_MAX, LogRing
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
    ring = LogRing(path)
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
    monkeypatch.setattr(log_ring, "START_BYTES", 8000)
    write(path, *map(str, range(1000)))
    ring = LogRing(path)
    first = messages(ring.news(0))
    assert 10 < len(first) <= LINES
    assert first[-1] == "999"
    write(path, *["x"] * (LINES + 50), "y" * (2 * MESSAGE_MAX))
    count, _ = found = ring.news(0)
    assert messages(found)[-1] == "y" * MESSAGE_MAX, "the newest line is there at once"
    assert len(messages(found)) <= LINES
    assert count < len(first) + LINES
