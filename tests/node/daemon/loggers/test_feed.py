"""A logger can neither block nor fail the node, whatever its process does."""

import asyncio
import sys
import time
from contextlib import asynccontextmanager

import pytest

from atoll.node.daemon.loggers import feed
from atoll.node.daemon.loggers.events import LoggedEvent, RoundEvents
from atoll.node.daemon.loggers.feed import LoggerFeed, LoggerProcess
from atoll.node.daemon.telemetry.round_log import RoundLog
from atoll.protocols.ids import PeerId, Round
from tests.waiting import HANGS_S, eventually

READY = "import os, sys; ok = lambda: os.write(1, b'.'); ok(); "
ECHO = READY + "[ok() for line in sys.stdin.buffer]"
HANGS = READY + "import time; time.sleep(3600)"
NEVER_READY = "import time; time.sleep(3600)"
DIES = READY + "sys.stdin.buffer.readline(); sys.exit('no more')"
HANGS_AT_ONCE_AND_AT_THE_END = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + READY + "time.sleep(3600)"
)


def event(number: int) -> LoggedEvent:
    return LoggedEvent(time=1.0, event="trained", round=number, values={"train_loss": 2.5})


@asynccontextmanager
async def running(folder, script: str | None, name: str = "jsonl"):
    command = (sys.executable, "-c", script) if script else feed.COMMAND
    one = LoggerProcess(name, folder / "loggers", "tiny", command)
    async with asyncio.timeout(HANGS_S), asyncio.TaskGroup() as group:
        serving = group.create_task(one.serve())
        words = folder / "loggers" / f"{name}.log"
        await eventually(lambda: words.exists() or one.trouble)
        yield one
        serving.cancel()


async def test_events_are_confirmed_one_by_one(tmp_path):
    async with running(tmp_path, ECHO) as one:
        for number in range(20):
            one.offer(event(number))
        await eventually(lambda: one.written == 20)
    assert (one.written, one.dropped) == (20, 0)
    assert one.state() == "20 events written"


async def test_what_is_queued_at_the_end_is_written(tmp_path):
    async with running(tmp_path, None) as one:
        one.offer(event(0))
        await eventually(lambda: one.written)
        for number in range(1, 50):
            one.offer(event(number))
    assert (one.written, one.dropped) == (50, 0)
    lines = (tmp_path / "loggers" / "jsonl" / "events.jsonl").read_text().splitlines()
    assert len(lines) == 50


@pytest.mark.parametrize("script", [HANGS, NEVER_READY, HANGS_AT_ONCE_AND_AT_THE_END])
async def test_a_logger_that_hangs_delays_no_round_and_no_end(tmp_path, monkeypatch, script):
    monkeypatch.setattr(feed, "CLOSE_S", 0.2)
    log = RoundLog(tmp_path, PeerId("me"), lambda: 1000.0)
    async with running(tmp_path, script) as one:
        loggers = LoggerFeed((one,), RoundEvents(log.rows), lambda: 1.0)
        log.listeners.append(loggers.on_event)
        began = time.process_time()
        for number in range(3 * feed.QUEUED):
            log.training_started(Round(number))
        offered_s = time.process_time() - began
        assert offered_s < 30.0, "each of them would have waited for a logger that writes nothing"
        assert one.dropped >= 2 * feed.QUEUED - 2
    log.close()
    assert (one.written, one.dropped) == (0, 3 * feed.QUEUED - 1), "the last round's time is not known yet"
    assert loggers.counts() == {"jsonl": (0, 3 * feed.QUEUED - 1)}


async def test_a_logger_that_hangs_is_killed_and_starts_again(tmp_path, monkeypatch):
    monkeypatch.setattr(feed, "WRITE_S", 0.2)
    monkeypatch.setattr(feed, "FIRST_BACKOFF_S", 0.01)
    async with running(tmp_path, HANGS) as one:
        one.offer(event(1))
        one.offer(event(2))
        await eventually(lambda: one.dropped == 2)
        assert one.written == 0


async def test_a_logger_that_dies_starts_again_and_says_where_its_words_are(tmp_path, monkeypatch):
    monkeypatch.setattr(feed, "FIRST_BACKOFF_S", 0.5)  # until the next one is ready the words are there
    async with running(tmp_path, DIES) as one:
        one.offer(event(1))
        await eventually(lambda: one.dropped == 1)
        assert "1 lost; it died; see jsonl.log" in one.state()
        assert "no more" in (tmp_path / "loggers" / "jsonl.log").read_text()
        one.offer(event(2))
        await eventually(lambda: one.dropped == 2)


async def test_a_logger_that_cannot_start_is_reported(tmp_path, monkeypatch):
    (tmp_path / "loggers").write_text("a file")
    async with running(tmp_path, ECHO) as one:
        await eventually(lambda: "cannot start" in one.trouble)
        one.offer(event(1))
    assert (one.written, one.dropped) == (0, 1)


async def test_what_a_package_raises_ends_its_process_only(tmp_path, monkeypatch):
    """A folder where the logger's file should be: it raises before it is ready."""
    monkeypatch.setattr(feed, "FIRST_BACKOFF_S", 0.01)
    (tmp_path / "loggers" / "jsonl" / "events.jsonl").mkdir(parents=True)
    async with running(tmp_path, None) as one:
        one.offer(event(1))
        await eventually(lambda: "it died" in one.trouble)
    assert "IsADirectoryError" in (tmp_path / "loggers" / "jsonl.log").read_text()


async def test_without_loggers_nothing_happens():
    loggers = LoggerFeed((), RoundEvents({}), lambda: 1.0)
    loggers.on_event("trained", {"round": 1})
    async with asyncio.timeout(HANGS_S):
        await loggers.serve()
    assert (loggers.states(), loggers.counts()) == ({}, {})
