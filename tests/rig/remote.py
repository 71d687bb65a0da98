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
    """An order that the peer could not carry out, with its reason."""


class Remote:
    """Sends orders to a peer process and waits for answers."""

    def __init__(self, host: Host, folder: Path) -> None:
        """Start the peer; what it prints to stderr is in `folder`."""
        self.host = host
        self.peer = ""
        with (folder / f"{host.name}.log").open("ab") as log:
            self._process = host.run(
                [sys.executable, "-m", "tests.rig.peer"],
                cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip

    def do(self, name: str, **order: Any) -> Any:
        """Send an order and return its answer. Raises OrderFailed, LabError."""
        self.begin(name, **order)
        return self.wait()

    def begin(self, name: str, **order: Any) -> None:
        """Send an order; `wait` for its answer before the next."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": name, **order}).encode() + b"\n")
        self._process.stdin.flush()

    def wait(self) -> Any:
        """Return the answer to the order before. Raises OrderFailed, LabError."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise LabError(f"the peer on {self.host.name} ended")
        found = json.loads(line)
        if not found["ok"]:
            raise OrderFailed(found["error"])
        return found["answer"]

    def new(self, seed: int, port: int, **options: Any) -> None:
        """Start a fresh node."""
        self.peer = self.do("new", seed=seed, port=port, **options)["peer"]

    def meet(self, other: "Remote", **options: Any) -> float:
        """Dial another peer at its own addresses and return the seconds that it took."""
        seconds: float = self.do("connect", peer=other.peer, maddrs=other.do("addresses"), **options)
        return seconds

    def path(self, other: "Remote") -> str:
        """Return the path to another peer."""
        return str(self.do("path", peer=other.peer))
