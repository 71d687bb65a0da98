"""The node's side of its loggers: a bounded queue and a process for each.

Loggers are programs of others, which block, die, print and open ports. In a process of its own each may do so: the
node offers it events without waiting, drops what does not fit, and starts it again when it hangs or dies.
"""

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from atoll.node.daemon.loggers.events import LoggedEvent, RoundEvents
from atoll.p2p.system.atomic_files import disk, make_folder
from atoll.p2p.system.child_processes import die_with_parent, end_child
from atoll.p2p.system.waiting import backoff_s
from atoll.protocols.errors import DiskFault
from atoll.protocols.local.control_messages import RoundStatus

log = logging.getLogger(__name__)

QUEUED = 1000
"""Most events that wait for a logger; the next one is dropped."""
START_S = 180.0
"""Deadline of a logger's start: some packages take many seconds to import on a busy machine."""
WRITE_S = 30.0
"""Deadline of one event; then the logger hangs, and is killed."""
CLOSE_S = 4.0
"""Deadline of writing what is queued, and of the logger's end, when the node ends."""
WORDS_BYTES = 1 << 20
"""A logger's log that is longer at a start of it begins anew."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 1.0, 300.0
COMMAND = (sys.executable, "-m", "atoll.node.daemon.loggers.child")
WHERE = "see {}.log in the folder `loggers` of the run"


class LoggerProcess:
    """One logger. `offer` never waits and never raises; `serve` keeps the process alive."""

    def __init__(self, name: str, folder: Path, run_name: str, command: tuple[str, ...] = COMMAND) -> None:
        """`folder`: of all loggers; this one writes to the folder, and its stderr to the file, of its name."""
        self.name = name
        self._folder = folder
        self._command = (*command, name, str(folder / name), run_name)
        self._queue: deque[bytes] = deque()
        self._has_event = asyncio.Event()
        self._is_ready = False
        self._is_sent = False
        """The first of the queue is at the logger, and not confirmed yet."""
        self.written = 0
        """Events that the logger confirmed."""
        self.dropped = 0
        """Events that were lost: the queue was full, or the logger died with them."""
        self.trouble = ""
        """Why the newest process ended; empty while one works."""

    def offer(self, event: LoggedEvent) -> None:
        """Queue an event, or drop it if the queue is full."""
        if len(self._queue) >= QUEUED:
            self.dropped += 1
            return
        self._queue.append(msgspec.json.encode(event))
        self._has_event.set()

    def state(self) -> str:
        """What it did, in one line for people."""
        lost = f", {self.dropped} lost" if self.dropped else ""
        return f"{self.written} events written{lost}" + (f"; {self.trouble}" if self.trouble else "")

    async def serve(self) -> None:
        """Run the process, and restart it, until cancelled; then write what is queued, within CLOSE_S."""
        deaths = 0
        try:
            while True:
                before = self.written
                await self._run_once()
                deaths = 1 if self.written > before else deaths + 1
                log.warning("logger %s: %s", self.name, self.trouble)
                await asyncio.sleep(backoff_s(deaths, first_s=FIRST_BACKOFF_S, max_s=MAX_BACKOFF_S))
        finally:
            self.dropped += len(self._queue)

    async def _run_once(self) -> None:
        try:
            process = await self._spawn()
        except (OSError, DiskFault) as error:
            self.trouble = f"cannot start: {error}"
            return
        try:
            await self._feed(process)
        except asyncio.CancelledError:
            await self._close(process)
            raise
        except TimeoutError:
            self.trouble = f"it hangs; {WHERE.format(self.name)}"
        except (asyncio.IncompleteReadError, ConnectionError):
            self.trouble = f"it died; {WHERE.format(self.name)}"
        finally:
            if self._is_sent:  # it may be what the logger cannot bear: it is not offered again
                self._queue.popleft()
                self.dropped += 1
            self._is_ready = self._is_sent = False
            await end_child(process)

    async def _spawn(self) -> asyncio.subprocess.Process:
        make_folder(self._folder)
        words = self._folder / f"{self.name}.log"
        with disk(words):
            stderr = words.open("ab")
            if stderr.tell() > WORDS_BYTES:
                stderr.truncate(0)
        with stderr:
            return await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=stderr,
                start_new_session=True, preexec_fn=die_with_parent(os.getpid()),
            )  # fmt: skip

    async def _feed(self, process: asyncio.subprocess.Process) -> None:
        """Write events one at a time, each confirmed. Raises TimeoutError, IncompleteReadError and such."""
        assert process.stdin is not None
        assert process.stdout is not None
        await _confirmed(process.stdout, START_S)
        self._is_ready, self.trouble = True, ""
        while True:
            if not self._queue:
                self._has_event.clear()
                await self._has_event.wait()
            if process.stdin.is_closing():
                raise ConnectionError("its stdin is closed")
            process.stdin.write(self._queue[0] + b"\n")
            self._is_sent = True
            await _confirmed(process.stdout, WRITE_S)
            self._take()

    def _take(self) -> None:
        """The first of the queue is written."""
        self._queue.popleft()
        self._is_sent = False
        self.written += 1

    async def _close(self, process: asyncio.subprocess.Process) -> None:
        """Confirm what was under way, write the rest, and let the logger end by itself."""
        assert process.stdin is not None
        with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            async with asyncio.timeout(CLOSE_S):
                if not process.stdin.is_closing():
                    process.stdin.write(b"".join(line + b"\n" for line in list(self._queue)[self._is_sent :]))
                    process.stdin.close()
                if not self._is_ready:
                    await _confirmed(process.stdout, CLOSE_S)
                while self._queue:
                    await _confirmed(process.stdout, CLOSE_S)
                    self._take()
                await process.wait()


class LoggerFeed:
    """All loggers of a node. Without any it does nothing."""

    def __init__(self, loggers: tuple[LoggerProcess, ...], events: RoundEvents, wall: Callable[[], float]) -> None:
        """`wall` gives seconds since 1970."""
        self.loggers = loggers
        self._events = events
        self._wall = wall

    def on_event(self, name: str, facts: Mapping[str, Any]) -> None:
        """Offer an event of the journal to each logger."""
        event = self._events.of(name, facts, self._wall()) if self.loggers else None
        if event is not None:
            for one in self.loggers:
                one.offer(event)

    async def serve(self) -> None:
        """Run all loggers until cancelled."""
        async with asyncio.TaskGroup() as group:
            for one in self.loggers:
                group.create_task(one.serve(), name=f"logger {one.name}")

    def states(self) -> dict[str, str]:
        """One line about each, by name."""
        return {one.name: one.state() for one in self.loggers}

    def counts(self) -> dict[str, tuple[int, int]]:
        """Events written and dropped, by name."""
        return {one.name: (one.written, one.dropped) for one in self.loggers}


def loggers_of(names: Iterable[str], folder: Path, run_name: str, rows: Mapping[int, RoundStatus]) -> LoggerFeed:
    """The loggers with these names, which write to folders in `folder`, of a round log's rows. None runs yet."""
    return LoggerFeed(tuple(LoggerProcess(name, folder, run_name) for name in names), RoundEvents(rows), time.time)


async def _confirmed(stdout: asyncio.StreamReader | None, limit_s: float) -> None:
    assert stdout is not None
    async with asyncio.timeout(limit_s):
        await stdout.readexactly(1)
