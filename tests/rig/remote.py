"""A `tests.rig.peer` program on a host of the lab, seen from outside."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from atoll_lab.lab import Host
from atoll_lab.namespaces import LabError

ROOT = Path(__file__).resolve().parent.parent.parent


class OrderFailed(Exception):
    """The peer said why it could not."""


class Remote:
    """Gives orders and waits for answers."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.peer = ""
        self._process = host.run(
            [sys.executable, "-m", "tests.rig.peer"],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def do(self, name: str, **order: Any) -> Any:
        """Raises OrderFailed, LabError."""
        self.begin(name, **order)
        return self.wait()

    def begin(self, name: str, **order: Any) -> None:
        """Send an order; `wait` for its answer before the next."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": name, **order}).encode() + b"\n")
        self._process.stdin.flush()

    def wait(self) -> Any:
        """The answer. Raises OrderFailed, LabError."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise LabError(f"the peer on {self.host.name} ended")
        found = json.loads(line)
        if not found["ok"]:
            raise OrderFailed(found["error"])
        return found["answer"]

    def new(self, seed: int, port: int, **options: Any) -> None:
        """A fresh node."""
        self.peer = self.do("new", seed=seed, port=port, **options)["peer"]

    def meet(self, other: "Remote", **options: Any) -> float:
        """Dial another where it says that it is; seconds."""
        seconds: float = self.do("connect", peer=other.peer, maddrs=other.do("addresses"), **options)
        return seconds

    def path(self, other: "Remote") -> str:
        """How it is connected to another."""
        return str(self.do("path", peer=other.peer))
