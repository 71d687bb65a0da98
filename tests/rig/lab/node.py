"""`atoll start` on a host of the lab: the whole product, asked over its control socket."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from atoll.cli.client import ask
from atoll.node.config.home import Home
from atoll.protocols.errors import AtollError
from atoll_lab.lab import Host
from atoll_lab.namespaces import LabError

PORT = 4710
START_S = 300.0
END_S = 120.0


class LabNode:
    """A node in its home folder on one host of the lab."""

    def __init__(self, host: Host, folder: Path) -> None:
        self.host, self.home = host, Home(folder / host.name)
        self.home.root.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None
        self.peer = ""

    def atoll(self, *words: str) -> None:
        """Run a command to its end. Raises LabError."""
        command = [sys.executable, "-m", "atoll.cli.main", "--home", str(self.home.root), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise LabError(f"{' '.join(words)}: {done.stderr}")

    def start(self, run_file: Path, *words: str, seeds: Sequence[str] = ()) -> None:
        """Start the daemon and wait until it answers. Raises LabError."""
        self.launch(run_file, *words, seeds=seeds)
        until(f"{self.host.name} is up", lambda: self.status().get("addresses"), START_S)
        self.peer = self.status()["peer"]

    def launch(self, run_file: Path, *words: str, seeds: Sequence[str] = ()) -> None:
        """Start the daemon."""
        command = [sys.executable, "-m", "atoll.cli.main", "--home", str(self.home.root), "start"]
        command += ["--run", str(run_file), "--threads", "1", "--port", str(PORT), "--eval-every", "1000", *words]
        for seed in seeds:
            command += ["--seed", seed]
        with (self.home.root / "out.log").open("ab") as log:
            self._process = self.host.run(command, stdout=log, stderr=log)

    def status(self) -> dict[str, Any]:
        """Return the node's status; empty while it does not answer."""
        return self._ask("status")

    def answered(self) -> dict[str, Any]:
        """Return the node's status, once it answers. Raises LabError."""
        found: dict[str, Any] = {}
        until(f"{self.host.name} answers", lambda: found.update(self.status()) or found, START_S)
        return found

    def path_to(self, other: "LabNode") -> str:
        """Return the path to another node; empty if they are not connected."""
        return str(self._row(other).get("path", ""))

    def answers_ping(self, other: "LabNode") -> bool:
        """Whether another node answered the last ping."""
        return self._row(other).get("rtt_s") is not None

    def maddr_of(self, other: "LabNode") -> str:
        """Return the address at which another node is connected."""
        return str(self._row(other).get("maddr", ""))

    def rounds(self) -> list[dict[str, Any]]:
        """Return the rows of the node's round log."""
        return list(self._ask("rounds").get("rounds", ()))

    def seed(self) -> str:
        """Return the address that others dial."""
        return f"/ip4/{self.host.public_address}/udp/{PORT}/quic-v1/p2p/{self.peer}"

    @property
    def running(self) -> bool:
        """Whether the daemon runs."""
        return self._process is not None and self._process.poll() is None

    def processes(self) -> list[psutil.Process]:
        """The daemon and its children; empty while it does not run."""
        if self._process is None or not self.running:
            return []
        daemon = psutil.Process(self._process.pid)
        return [daemon, *daemon.children(recursive=True)]

    def last_words(self) -> str:
        """Return the last line that the daemon printed."""
        lines = (self.home.root / "out.log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it printed nothing"

    def kill(self) -> None:
        """SIGKILL the daemon; its children follow by themselves."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=10)

    def terminate(self) -> None:
        """Ask the daemon to end in good order."""
        if self.running:
            assert self._process is not None
            os.kill(self._process.pid, signal.SIGTERM)

    def wait(self) -> None:
        """Wait until the daemon has ended. Raises LabError."""
        assert self._process is not None
        try:
            self._process.wait(timeout=END_S)
        except subprocess.TimeoutExpired as error:
            raise LabError(f"{self.host.name} did not end within {END_S:.0f} s") from error

    def stop(self) -> None:
        """End the daemon in good order. Raises LabError."""
        self.terminate()
        self.wait()

    def _row(self, other: "LabNode") -> dict[str, Any]:
        rows = self._ask("peers").get("peers", ())
        return next((row for row in rows if row["peer"] == other.peer), {})

    def _ask(self, what: str) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = ask(self.home.root, what)
        except AtollError:
            return {}
        return answer


def until(what: str, true: Callable[[], Any], limit_s: float) -> float:
    """Return the seconds until `true()` is true. Raises LabError."""
    began = time.monotonic()
    while time.monotonic() < began + limit_s:
        if true():
            return time.monotonic() - began
        time.sleep(0.1)
    raise LabError(f"not within {limit_s:.0f} s: {what}")
