"""The log: JSON lines, private, rotated, and followed across rotations."""

import json
import logging

import pytest

from atoll.node.daemon.telemetry.logfile import LogTail, log_handler


@pytest.fixture
def log(tmp_path):
    handler = log_handler(tmp_path / "node.log")
    logger = logging.Logger("atoll.test")
    logger.addHandler(handler)
    yield logger
    handler.close()


def messages(lines) -> list[str]:
    return [line.message for line in lines]


def test_lines_are_json_and_private(log, tmp_path):
    log.warning("two\nlines, %s", "“quoted”")
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("failed")
    first, second = map(json.loads, (tmp_path / "node.log").read_text(encoding="utf-8").splitlines())
    assert first["message"] == "two\nlines, “quoted”"
    assert (first["level"], first["logger"]) == ("warning", "atoll.test")
    assert second["message"].startswith("failed\nTraceback")
    assert (tmp_path / "node.log").stat().st_mode & 0o777 == 0o600


def test_tail_and_what_comes_after(log, tmp_path):
    for number in range(10):
        log.info("%d", number)
    tail = LogTail(tmp_path / "node.log")
    assert messages(tail.last(3)) == ["7", "8", "9"]
    assert tail.fresh() == ()
    log.info("10")
    assert messages(tail.fresh()) == ["10"]
    assert LogTail(tmp_path / "node.log").last(0) == ()


def test_half_a_line_waits_for_its_end(tmp_path):
    path = tmp_path / "node.log"
    path.write_text('{"time":"t","level":"info","logger":"l","message":"wh')
    tail = LogTail(path)
    assert tail.last(5) == ()
    with path.open("a") as file:
        file.write('ole"}\nnot json\n')
    assert messages(tail.fresh()) == ["whole", "not json"]


@pytest.mark.parametrize("removed", ["deleted", "moved"])
def test_a_file_that_somebody_removes_is_begun_anew(log, tmp_path, removed):
    """`rm node.log` to make room: the node wrote on into a file without a name, and `atoll logs` was empty."""
    path = tmp_path / "node.log"
    log.info("before")
    if removed == "deleted":
        path.unlink()
    else:
        path.rename(tmp_path / "node.log.old")
    log.info("after")
    assert messages(LogTail(path).last(5)) == ["after"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_follows_over_a_rotation(log, tmp_path):
    path = tmp_path / "node.log"
    log.info("before")
    tail = LogTail(path)
    tail.last(5)
    log.handlers[0].doRollover()
    log.info("after")
    assert messages(tail.fresh()) == ["after"]


def test_no_log_yet(tmp_path):
    tail = LogTail(tmp_path / "node.log")
    assert tail.last(5) == ()
    assert tail.fresh() == ()
    (tmp_path / "node.log").write_text('{"time":"","level":"","logger":"","message":"first"}\n')
    assert messages(tail.fresh()) == ["first"]


def test_the_tail_of_a_long_log_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("atoll.node.daemon.telemetry.logfile.TAIL_MAX_BYTES", 1000)
    path = tmp_path / "node.log"
    path.write_text("".join(f"line {number:04}\n" for number in range(1000)))
    found = messages(LogTail(path).last(10_000))
    assert found[-1] == "line 0999"
    assert 95 <= len(found) <= 100
    assert all(len(line) == 9 for line in found)
