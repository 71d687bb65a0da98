"""Follows the durable steps of a node, and strikes before or after one of them; or gives it another wall clock, or
makes it a liar or one of a newer version, or writes down what its memory is used for.

Python imports `sitecustomize` from PYTHONPATH at the start of a process. A step is a call that makes something
durable (fsync, a new name, a commit of the ledger), named by the function of atoll that wants it. The product has
no such points: only processes that a case starts are followed.

CHAOS_FOLDER   where `steps-daemon` and `steps-worker` get each step's name when it is first taken, and `struck`
CHAOS_STRIKE   JSON: role, step, when (before, after), nth, how (kill, eio)
CHAOS_READS    a folder: reads of files below it are steps too, in `reads-daemon` and `reads-worker` (`reads.py`)
CHAOS_CLOCK_S  seconds by which `time.time` is ahead
CHAOS_CLOCK    a file with such seconds: what it says counts from its next change on
CHAOS_LIES     if set, the node lies (`liar.py`)
CHAOS_WIRES    JSON: by the name of a wire in protocols/wires.py the one version of it that the node speaks
CHAOS_ALLOCATIONS  a folder: every minute, what has grown since the third, by line (tracemalloc, which is slow)
"""

import errno
import itertools
import json
import os
import signal
import sqlite3
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable

import reads

ROOT = os.environ.get("CHAOS_ROOT", "") + "/"
AREAS = tuple(ROOT + area for area in ("p2p", "node"))
PLUMBING = ("p2p/system/atomic_files.py", "node/checkpoint/disk.py", "p2p/ledger/database.py")
"""Where all go through: the step is named by who calls it."""
WORKER = "atoll.node.worker.main"
MINUTE_S, WARM_MINUTES, LINES = 60.0, 3, 40
NAMING = ("replace", "rename", "link")


class Probe:
    """The durable steps of one process."""

    def __init__(self) -> None:
        self.role = "worker" if WORKER in sys.orig_argv else "daemon"
        self.folder = os.environ["CHAOS_FOLDER"]
        self.strike = json.loads(os.environ.get("CHAOS_STRIKE", "{}"))
        self.counts: dict[str, int] = {}

    def watch(self, kind, act):
        """`act`, followed."""

        def watched(*args, **named):
            step = f"{kind} {caller()}"
            self.reach(step, "before", kind)
            found = act(*args, **named)
            self.reach(step, "after", kind)
            return found

        return watched

    def reach(self, step: str, when: str, kind: str) -> None:
        """A step is about to be taken, or was just taken."""
        if when == "before":
            self.counts[step] = self.counts.get(step, 0) + 1
            if self.counts[step] == 1:
                self.write(f"{'reads' if kind in reads.KINDS else 'steps'}-{self.role}", step)
        strike = self.strike
        wanted = strike and (strike["role"], strike["step"], strike["when"]) == (self.role, step, when)
        if wanted and self.counts[step] == strike["nth"]:
            self.write("struck", step)
            if strike["how"] == "eio":
                self.fail(kind)
            if self.role == "worker":
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    @staticmethod
    def fail(kind: str) -> None:
        """As a bad sector does."""
        if kind in ("commit", "select"):
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise error
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def write(self, name: str, line: str) -> None:
        """Append a line; the process may be dead a moment later."""
        with open(os.path.join(self.folder, name), "a") as file:
            file.write(f"{line}\n")


def caller() -> str:
    """The innermost function of atoll that is no plumbing."""
    frame = sys._getframe(2)
    found = "nobody"
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(AREAS):
            found = f"{code.co_filename[len(ROOT) :]}:{code.co_qualname}"
            if not found.startswith(PLUMBING):
                return found
        frame = frame.f_back
    return found


def follow(probe: Probe) -> None:
    """Put the probe between the process and the kernel."""
    os.fsync = probe.watch("fsync", os.fsync)
    for name in NAMING:
        setattr(os, name, probe.watch(name, getattr(os, name)))
    begin = sqlite3.connect

    class Connection(sqlite3.Connection):
        """Its commits are steps."""

        def execute(self, statement, *values):
            if statement != "COMMIT":
                return super().execute(statement, *values)
            return probe.watch("commit", super().execute)(statement)

    sqlite3.connect = lambda *args, **named: begin(*args, factory=Connection, **named)


def set_clock(ahead_s: Callable[[], float]) -> None:
    """Another wall clock for all that asks this module. The monotonic clock stays."""
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + ahead_s()
    time.time_ns = lambda: now_ns() + int(ahead_s() * 1e9)


class Jumps:
    """Seconds that stand in a file, read again when it is another file: a clock that somebody sets."""

    def __init__(self, path: str) -> None:
        self.path, self.ahead_s, self.seen = path, 0.0, None

    def __call__(self) -> float:
        try:
            found = os.stat(self.path)
        except OSError:
            return self.ahead_s
        if self.seen != (found.st_ino, found.st_mtime_ns):
            with open(self.path) as file:
                self.ahead_s = float(file.read())
            self.seen = found.st_ino, found.st_mtime_ns
        return self.ahead_s


def speak(versions: dict[str, int]) -> None:
    """Of these wires one version each: the node is of another release than its peers."""
    import msgspec

    from atoll.protocols import wires

    for name, version in versions.items():
        wire = msgspec.structs.replace(getattr(wires, name), newest=version, oldest=version)
        setattr(wires, name, wire)


def write_allocations(folder: str) -> None:
    """Begin to write down what grows, for whoever looks for a leak."""
    tracemalloc.start()
    path = os.path.join(folder, f"allocations-{'worker' if WORKER in sys.orig_argv else 'daemon'}-{os.getpid()}")

    def write() -> None:
        before = None
        for minute in itertools.count(1):
            time.sleep(MINUTE_S)
            now = tracemalloc.take_snapshot()
            if minute == WARM_MINUTES:
                before = now
            if before is not None:
                with open(path, "w") as file:
                    file.writelines(f"{grown}\n" for grown in now.compare_to(before, "lineno")[:LINES])

    threading.Thread(target=write, daemon=True).start()


if any("atoll" in part for part in sys.orig_argv) and "-c" not in sys.orig_argv:
    if "CHAOS_FOLDER" in os.environ:
        follow(probe := Probe())
        if "CHAOS_READS" in os.environ:
            reads.follow(probe, os.environ["CHAOS_READS"], caller)
    if "CHAOS_CLOCK_S" in os.environ:
        set_clock(lambda ahead_s=float(os.environ["CHAOS_CLOCK_S"]): ahead_s)
    if "CHAOS_CLOCK" in os.environ:
        set_clock(Jumps(os.environ["CHAOS_CLOCK"]))
    if "CHAOS_WIRES" in os.environ:
        speak(json.loads(os.environ["CHAOS_WIRES"]))
    if "CHAOS_ALLOCATIONS" in os.environ:
        write_allocations(os.environ["CHAOS_ALLOCATIONS"])
    if "CHAOS_LIES" in os.environ:
        import liar

        (liar.lie_in_worker if WORKER in sys.orig_argv else liar.lie_in_daemon)()
