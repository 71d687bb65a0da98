"""Real node processes on loopback for `atoll sim`: start, ask, kill, stop. Signals go to our own pids only."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil

from atoll.cli.client import call
from atoll.node.config.home import Home
from atoll.p2p.system.child_processes import die_with_parent
from atoll.protocols.errors import AtollError, LocalFault
from atoll.protocols.local.control_messages import MAX_ROUNDS, Ask, GetRounds, GetStatus, PauseNode, ResumeNode

STOP_S = 30.0
POLL_S = 0.2
NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
"""With it each start compiles all of the node's modules anew, which no user's node does."""


def kept_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a node, which keeps what Python compiles whatever the caller does."""
    return {name: value for name, value in environ.items() if name != NO_BYTECODE}


class SimNode:
    """One node of a simulated swarm, in its own home."""

    def __init__(self, number: int, folder: Path, run_file: Path) -> None:
        self.number = number
        self.home = folder / f"node-{number}"
        self.home.mkdir(parents=True, exist_ok=True)
        self._run_file = run_file
        self._process: subprocess.Popen[bytes] | None = None
        self._is_told = False
        """To end. A second signal would end the process at once, before it handed on what only it has."""
        self.peer = ""

    @property
    def running(self) -> bool:
        """Whether the daemon process lives."""
        return self._process is not None and self._process.poll() is None

    def start(self, seeds: list[str]) -> None:
        """Start the daemon; it picks a free port."""
        command = [sys.executable, "-m", "atoll.cli.main", "--home", str(self.home)]
        command += ["start", "--run", str(self._run_file)]
        command += ["--listen", "/ip4/127.0.0.1/tcp/0", "--threads", "1"]
        for seed in seeds:
            command += ["--peer", seed]
        with (self.home / "out.log").open("ab") as log:
            self._is_told = False
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=die_with_parent(os.getpid()), env=kept_environment(os.environ),
            )  # fmt: skip

    def wait_up(self, patience_s: float, sleep: Callable[[float], None] = time.sleep) -> None:
        """`sleep` until the control socket answers. Raises LocalFault with the node's last words."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            status = self.status()
            if status is not None and status["addresses"]:
                self.peer = status["peer"]
                return
            if not self.running:
                break
            sleep(POLL_S)
        raise LocalFault(f"node {self.number} did not start: {self.last_words()}", hint=f"see {self.home}/out.log")

    def seed(self) -> str:
        """Multiaddr for others to dial; empty while it does not answer, or has none."""
        status = self.status()
        return f"{status['addresses'][0]}/p2p/{status['peer']}" if status and status["addresses"] else ""

    def status(self) -> dict[str, Any] | None:
        """Its status, or None while it does not answer."""
        return self._ask(GetStatus())

    def rounds(self, last: int = MAX_ROUNDS) -> list[dict[str, Any]]:
        """Its newest `last` rows, one per round, oldest first; none while it does not answer."""
        answer = self._ask(GetRounds(last))
        return list(answer["rounds"]) if answer else []

    def pause(self, reason: str) -> bool:
        """Finish the round at hand and train no other; whether it was told."""
        return self._ask(PauseNode(reason)) is not None

    def resume(self) -> bool:
        """Go on after a pause; whether it was told."""
        return self._ask(ResumeNode()) is not None

    def kill(self) -> None:
        """SIGKILL the daemon. Its p2pd and worker must end by themselves."""
        if self._process is not None and self.running:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def terminate(self) -> None:
        """SIGTERM, once."""
        if self._process is not None and self.running and not self._is_told:
            self._is_told = True
            self._process.terminate()

    def stop(self, patience_s: float = STOP_S) -> None:
        """SIGTERM if it had none, then SIGKILL after `patience_s` seconds."""
        if self._process is None:
            return
        self.terminate()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def processes(self) -> list[psutil.Process]:
        """The daemon and its children."""
        if self._process is None or not self.running:
            return []
        daemon = psutil.Process(self._process.pid)
        return [daemon, *daemon.children(recursive=True)]

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far: `daemon` (with its p2pd) and `worker`."""
        spent = {"daemon": 0.0, "worker": 0.0}
        for process in self.processes():
            try:
                times, line = process.cpu_times(), " ".join(process.cmdline())
            except psutil.NoSuchProcess:
                continue
            trains = "atoll.node.worker.main" in line or "atoll.node.worker.multi_device" in line
            spent["worker" if trains else "daemon"] += times.user + times.system
        return spent

    def last_words(self) -> str:
        """Last line that the node printed."""
        lines = (self.home / "out.log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it printed nothing"

    def _ask(self, request: Ask) -> dict[str, Any] | None:
        try:
            answer: dict[str, Any] = msgspec.to_builtins(call(Home(self.home), request, msgspec.Struct))
        except AtollError:
            return None
        return answer
