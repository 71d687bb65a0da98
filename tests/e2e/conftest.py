"""Real `atoll start` processes in homes of their own, as a user would run them. Only our own pids get signals."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from atoll.cli.client import ANSWER_S, NoAnswer, ask
from atoll.node.config.home import Home
from atoll.protocols.errors import AtollError
from tests.tracebacks import tracebacks
from tests.waiting import HANGS_S, poll

LOCAL = "/ip4/127.0.0.1/tcp/0"
SMALL = ("outer.rounds=400", "outer.stages=[[0,1]]", "inner.batch=2", "pace.lease_s=4")
TWO = ("--set", "pace.min_members=2")
"""For runs of two nodes: the first one does not train while the second one loads its modules."""


class Ended:
    """How a command ended, and what it printed."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def refused(self, code: int, *said: str) -> None:
        """One clear line on stderr, this exit code, no traceback."""
        assert self.code == code, (self.code, self.err)
        assert self.err.count("\n") == 1, self.err
        assert self.err.startswith("error: "), self.err
        assert "Traceback" not in self.out + self.err
        for words in said:
            assert words in self.err, self.err


class Node:
    """One home, and at most one daemon in it."""

    def __init__(self, root: Path, pids: set[int]) -> None:
        self.home = Home(root)
        self._pids = pids
        self._children: set[psutil.Process] = set()
        self.process: subprocess.Popen[str] | None = None
        self._starts = 0
        self.environment: dict[str, str] = {}
        """Variables of its processes beside those of the tests."""

    def atoll(self, *args: str, limit_s: float = HANGS_S) -> Ended:
        """Run a command to its end."""
        process = self._spawn(args)
        try:
            out, err = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"{args} did not end: {out} {err}") from None
        return Ended(process.returncode, out, err)

    def new_run(self, *args: str, name: str = "tiny") -> Path:
        """A small run of this node."""
        flags = [part for change in SMALL for part in ("--set", change)]
        made = self.atoll("run", "new", name, "--seed", "1", *flags, *(args or ("--data", "synthetic:markov")))
        assert made.code == 0, made.err
        return self.home.run_file(name)

    def start(self, *args: str, listen: str = LOCAL) -> "Node":
        """Start the daemon and do not wait."""
        self._starts += 1
        self.process = self._spawn(
            ("start", "--listen", listen, "--threads", "1", "--eval-every", "1000", *args), log=True
        )
        return self

    def start_refused(self, *args: str) -> Ended:
        """Run `start` where it must end by itself."""
        return self.atoll("start", "--listen", LOCAL, "--threads", "1", *args)

    def up(self) -> "Node":
        """Wait until the daemon answers."""
        poll(
            "the node is up", lambda: self._alive() and (s := self.status()) and s["addresses"] and s["worker_pid"]
        )
        self.remember()
        return self

    def remember(self) -> None:
        """Note the pids of the children, to see later that they are gone."""
        assert self.process is not None
        self._children |= set(psutil.Process(self.process.pid).children(recursive=True))
        self._pids |= {child.pid for child in self._children}

    def left(self) -> list[psutil.Process]:
        """Children that are still there."""
        return [child for child in self._children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]

    def status(self) -> dict[str, Any] | None:
        """Its status, or None while it does not answer."""
        return self._ask("status")

    def peers(self) -> list[dict[str, Any]]:
        return (self._ask("peers") or {"peers": []})["peers"]

    def rows(self) -> list[dict[str, Any]]:
        return (self._ask("rounds") or {"rounds": []})["rounds"]

    def final(self) -> int:
        """Newest final round; -1 before the first and while it does not answer."""
        status = self.status()
        return status["final"] if status else -1

    def goes_on(self, rounds: int = 2, limit_s: float = HANGS_S) -> None:
        """More rounds become final."""
        wanted = self.final() + rounds
        poll(f"round {wanted} is final", lambda: self._alive() and self.final() >= wanted, limit_s)

    def seed(self) -> str:
        status = self.status()
        assert status is not None
        return f"{status['addresses'][0]}/p2p/{status['peer']}"

    def signal(self, number: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def wait(self, limit_s: float = HANGS_S) -> int:
        """Wait for the end; its exit code."""
        assert self.process is not None
        return self.process.wait(limit_s)

    def stop(self) -> None:
        """End in good order, and check that it was."""
        stop_all(self)

    def ask_to_stop(self) -> None:
        """Let it begin to end in good order."""
        self.remember()
        self.signal(signal.SIGTERM)

    def stopped(self) -> None:
        """Wait for the end that it was asked for, and check that it was in good order."""
        code = self.wait()
        assert code == 0, (code, self.said()[-2000:], self.home.log.read_text(errors="replace")[-2000:])
        self.clean()

    @property
    def run_folder(self) -> Path:
        """The folder of the only run."""
        return next(path for path in self.home.runs.iterdir() if path.is_dir())

    def said(self) -> str:
        """What the daemon printed to stdout and stderr."""
        return self._log("out.log") + self._log("err.log")

    def errors(self) -> str:
        """What the newest daemon printed to stderr."""
        return self._log("err.log")

    def clean(self) -> None:
        """No traceback anywhere that a user looks."""
        assert tracebacks(self.home.root) == []
        assert "Traceback" not in self.said(), self.said()[-3000:]

    def _log(self, name: str) -> str:
        path = self._beside(name)
        return path.read_text(errors="replace") if path.exists() else ""

    def _beside(self, name: str) -> Path:
        return self.home.root.with_name(f"{self.home.root.name}.{self._starts}.{name}")

    def _alive(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"the node ended with {self.process.returncode}: {self.said()[-2000:]}"
        return True

    def _ask(self, what: str) -> dict[str, Any] | None:
        """Where a node is there and does not answer in time, the machine is busy, and it is asked again."""
        for _ in range(round(HANGS_S / ANSWER_S)):
            try:
                return ask(self.home.root, what)
            except NoAnswer:
                continue
            except AtollError:
                return None
        return None

    def _spawn(self, args: tuple[str, ...], *, log: bool = False) -> "subprocess.Popen[str]":
        out: Any = self._beside("out.log").open("w") if log else subprocess.PIPE
        err: Any = self._beside("err.log").open("w") if log else subprocess.PIPE
        command = [sys.executable, "-m", "atoll.cli.main", "--home", str(self.home.root), *args]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            text=True,
            start_new_session=True,
            env={**os.environ, **self.environment},
        )
        if log:
            out.close()
            err.close()
        self._pids.add(process.pid)
        return process


def stop_all(*nodes: Node) -> None:
    """`Node.stop` of all of them at once: one after the other, each would train on while it waits for its turn."""
    for node in nodes:
        node.ask_to_stop()
    for node in nodes:
        node.stopped()


@contextmanager
def nodes_in(folder: Path) -> Iterator[Callable[..., Node]]:
    """Makes nodes with homes in `folder`; all of their processes are gone afterwards."""
    made: dict[str, Node] = {}
    pids: set[int] = set()

    def make(name: str, root: Path | None = None) -> Node:
        if name not in made:
            made[name] = Node(root or folder / name, pids)
        return made[name]

    try:
        yield make
    finally:
        for node in made.values():
            if node.process is not None and node.process.poll() is None:
                node.remember()
                node.process.kill()
                node.process.wait()
        for node in made.values():
            for child in node.left():
                child.kill()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """See `nodes_in`."""
    with nodes_in(tmp_path) as make:
        yield make


@pytest.fixture
def node(nodes) -> Node:
    return nodes("home")


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 64 MiB, to be filled. Fails (and says why) where none can be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m,mode=700", "tmpfs", str(place)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.fail(f"CAPABILITY MISSING: tests of a full disk must mount a tmpfs (run as root): {done.stderr}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def until() -> Callable[..., Any]:
    """See `poll`."""
    return poll
