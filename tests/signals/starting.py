"""One start of a real node that is told to stop at one place of its progress, and what is wrong with its end."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from atoll.cli.client import ask
from atoll.node.config.home import Home
from atoll.protocols.errors import AtollError
from tests.waiting import HANGS_S, poll

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "atoll.cli.main")
QUIET = ("outer.rounds=100000", "outer.stages=[[0,1]]", "inner.batch=2", "pace.lease_s=4")
LISTEN = ("--listen", "/ip4/127.0.0.1/tcp/0", "--threads", "1", "--eval-every", "1000")
STRAY = re.compile(r"Traceback|was destroyed|never awaited|Exception ignored|Fatal Python|Error:|WARNING|ERROR")
ORDERLY = {0, 130}
ENDS = {
    "SIGINT": ORDERLY | {-signal.SIGINT},
    "SIGTERM": ORDERLY | {-signal.SIGTERM},
    "stop": {0, 130},
    "twice": ORDERLY | {-signal.SIGINT},
}
"""Exit codes that docs/control.md promises; a shell shows −2 as 130 and −15 as 143."""


@dataclass(frozen=True, slots=True)
class Moment:
    """When, and how, a start is told to stop."""

    place: str
    """`daemon load click`, `worker call node/worker/session.py:Session.train`, … (see the probe); empty: never."""
    how: str
    """A key of ENDS."""
    link: str = ""
    """The invite to start with, in a home of its own; empty: the run of the home."""


@dataclass(slots=True)
class End:
    """How a start ended."""

    moment: Moment
    code: int
    said: str
    took_s: float
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        how = "; ".join(self.wrong) or "ok"
        return f"{self.moment.how:8}{self.code:4}{self.took_s:7.1f} s  {self.moment.place}  {how}"


class Starter:
    """A folder with a home, and the starts in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = Home(folder / "home")
        (folder / "tmp").mkdir()
        self._joins = 0
        self._known: set[str] = set()
        """Temporary files before this start: what a process leaves that is killed, the next ones sweep later."""

    def make_run(self) -> Path:
        """A run whose rounds take a moment; the file of it."""
        flags = [part for change in QUIET for part in ("--set", change)]
        words = ("--home", str(self.home.root), "run", "new", "tiny", "--seed", "1", "--data", "synthetic:markov")
        subprocess.run((*COMMAND, *words, *flags), check=True, capture_output=True, timeout=HANGS_S)
        return self.home.run_file("tiny")

    def places(self) -> dict[str, list[str]]:
        """The places of a whole start, until the first round of this life is final, in order, by process."""
        files = {role: self.folder / f"places-{role}" for role in ("daemon", "worker")}
        for file in files.values():
            file.unlink(missing_ok=True)
        over = self.folder / "over"
        over.unlink(missing_ok=True)
        process = self._spawn(Moment("", "stop"), self.home)
        try:
            before = poll("it answers", lambda: process.poll() is not None or self._status())
            assert isinstance(before, dict), "it ended at once"
            poll("a round is final", lambda: (now := self._status()) and now["final"] > before["final"])
        finally:
            over.touch()
            process.terminate()
            said = "".join(process.communicate(timeout=HANGS_S))
            over.unlink()
            if process.returncode != 0:
                raise AssertionError(f"exit code {process.returncode}: {said}")
        return {role: file.read_text().splitlines() for role, file in files.items()}

    def end_at(self, moment: Moment) -> End:
        """Start, stop at this moment, and judge the end."""
        home = self._home_of(moment)
        (self.folder / "reached").unlink(missing_ok=True)
        self._known = self._temporary()
        process = self._spawn(moment, home)
        try:
            poll(
                f"it reaches {moment.place}",
                lambda: (self.folder / "reached").exists() or process.poll() is not None,
            )
            reached = time.monotonic()
            if moment.how in ("stop", "twice"):
                self._ask_to_stop(moment, process, home)
            out, err = process.communicate(timeout=HANGS_S)
        except (AssertionError, subprocess.TimeoutExpired):
            process.kill()
            out, err = process.communicate()
            return End(moment, process.returncode, out + err, HANGS_S, ["it did not end, or never came there"])
        end = End(moment, process.returncode, out + err, time.monotonic() - reached)
        end.wrong = list(self._wrong(end, err, home))
        return end

    def _home_of(self, moment: Moment) -> Home:
        if not moment.link:
            return self.home
        self._joins += 1
        return Home(self.folder / f"joins{self._joins}")

    def _ask_to_stop(self, moment: Moment, process: "subprocess.Popen[str]", home: Home) -> None:
        if moment.how == "twice":
            process.send_signal(signal.SIGINT)
            return
        subprocess.run(
            (*COMMAND, "--home", str(home.root), "stop"), check=True, capture_output=True, timeout=HANGS_S
        )

    def _wrong(self, end: End, err: str, home: Home) -> Iterator[str]:
        """What an end in good order has not: unknown codes, strange words, processes, temporary files."""
        if not (self.folder / "reached").exists():
            yield "it ended before it came there"
        if end.code not in ENDS[end.moment.how]:
            yield f"exit code {end.code}"
        if STRAY.search(err):
            yield f"stderr: {err[-2000:]}"
        logs = [home.log, *home.runs.glob("*/worker.log")]
        for log in logs:
            if log.exists() and (found := re.search(r"Traceback|was destroyed|never awaited", log.read_text())):
                yield f"{log.name} has {found[0]!r}"
                log.unlink()
        left = self._left()
        is_orderly = end.code in ORDERLY and end.moment.how != "twice"
        if left and is_orderly:
            yield f"left behind: {left}"
        deadline = time.monotonic() + HANGS_S
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        if left:
            yield f"left for {HANGS_S:.0f} s: {left}"
            for pid in left:
                psutil.Process(pid).kill()
        strays = self._temporary() - self._known
        if strays and is_orderly:
            yield f"temporary files left: {strays}"

    def _temporary(self) -> set[str]:
        return {path.name for path in (self.folder / "tmp").iterdir()}

    def _left(self) -> list[int]:
        """Processes of this folder's starts: children inherit the environment, whoever their parent is now."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and process.environ().get("SIGNALS_FOLDER") == str(self.folder):
                    found.append(process.pid)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found

    def _status(self) -> dict[str, Any] | None:
        try:
            return ask(self.home.root, "status")
        except AtollError:
            return None

    def _spawn(self, moment: Moment, home: Home) -> "subprocess.Popen[str]":
        number = {"SIGINT": signal.SIGINT, "twice": signal.SIGINT, "SIGTERM": signal.SIGTERM}.get(moment.how, 0)
        own = {
            "PYTHONPATH": str(Path(__file__).with_name("probe")),
            "SIGNALS_ROOT": str(ROOT),
            "SIGNALS_FOLDER": str(self.folder),
            "SIGNALS_PLACE": moment.place,
            "SIGNALS_NUMBER": str(int(number)),
            "TMPDIR": str(self.folder / "tmp"),
            "OMP_NUM_THREADS": "1",
        }
        words = (moment.link, "--yes") if moment.link else ()
        return subprocess.Popen(
            (*COMMAND, "--home", str(home.root), "start", *words, *LISTEN),
            env={**os.environ, **own}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
        )  # fmt: skip
