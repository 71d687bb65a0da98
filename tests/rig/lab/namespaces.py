"""One Linux network namespace: made, configured, entered and removed."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from atoll.protocols.errors import LocalFault

T = TypeVar("T")
CLONE_NEWNET = 0x40000000
FOLDER = Path("/run/netns")
LIBC = ctypes.CDLL(None, use_errno=True)


class LabError(LocalFault):
    """The lab was asked for something impossible, or the kernel refused a step; the message says which."""


def command(*words: str, text: str = "") -> str:
    """Run a program of the system and return its output. Raises LabError with its error output."""
    ran = subprocess.run(words, input=text, capture_output=True, text=True, timeout=60, check=False)
    if ran.returncode != 0:
        raise LabError(f"{' '.join(words)}: {ran.stderr.strip() or ran.returncode}")
    return ran.stdout


def enter(name: str) -> None:
    """Move the calling thread into a namespace. Raises OSError. (os.setns is there only from Python 3.12 on.)"""
    descriptor = os.open(FOLDER / name, os.O_RDONLY)
    try:
        if LIBC.setns(descriptor, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {name}")
    finally:
        os.close(descriptor)


class Namespace:
    """A network of its own with only a loopback device, until links are plugged in."""

    def __init__(self, name: str) -> None:
        """Choose the name; `make` creates the namespace."""
        self.name = name

    def make(self) -> None:
        """Create the namespace. Raises LabError."""
        command("ip", "netns", "add", self.name)
        self.ip("link set lo up")

    def ip(self, *lines: str) -> None:
        """Run lines of ip(8), without `ip`, in one process. Raises LabError at the first that fails."""
        command("ip", "-n", self.name, "-batch", "-", text="\n".join(lines) + "\n")

    def nft(self, rules: str) -> None:
        """Apply rules of nft(8), all of them or none. Raises LabError."""
        command("ip", "netns", "exec", self.name, "nft", "-f", "-", text=rules)

    def tc(self, words: str) -> None:
        """Run one line of tc(8), without `tc`. Raises LabError."""
        command("tc", "-n", self.name, *words.split())

    def inside(self, act: Callable[[], T]) -> T:
        """What `act` gives back when it runs in this network; sockets that it opens stay here for ever.

        It runs in a thread of its own, because a thread that has entered does not come back.
        """

        def run() -> T:
            enter(self.name)
            return act()

        with ThreadPoolExecutor(1, self.name) as threads:
            return threads.submit(run).result()

    def set_kernel(self, setting: str, value: str) -> None:
        """Write a setting below /proc/sys/net of this network. Raises OSError."""
        self.inside(lambda: Path("/proc/sys/net", setting).write_text(value))

    def remove(self) -> None:
        """End what runs inside, and remove the namespace if it exists. Raises LabError.

        Several labs may sweep the same one at the same time: that another one was faster is no fault.
        """
        try:
            end_processes([self])
            command("ip", "netns", "del", self.name)
        except (FileNotFoundError, LabError):
            if (FOLDER / self.name).exists():
                raise


def processes_of(namespaces: Iterable[Namespace]) -> list[int]:
    """Return the processes in these networks, without the caller."""
    networks = {(FOLDER / namespace.name).stat().st_ino for namespace in namespaces}
    return [process_id for process_id in process_ids() if network_of(process_id) in networks]


def process_ids() -> list[int]:
    """Return all processes of the machine but this one."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]


def network_of(process_id: int) -> int | None:
    """Return the inode of a process's network, None when the process is gone."""
    try:
        return os.stat(f"/proc/{process_id}/ns/net").st_ino
    except OSError:
        return None


def end_processes(namespaces: Sequence[Namespace], patience_s: float = 1.0) -> None:
    """Ends what runs in these networks: a request, then force after `patience_s`. Raises LabError if any stays.

    Who enters meanwhile gets the same signal: a program may still be on its way in.
    """
    for how, wait_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, 10.0)):
        left = sent_until_none(namespaces, how, wait_s)
        if not left:
            return
    raise LabError(f"processes that do not end: {left}")


def sent_until_none(namespaces: Sequence[Namespace], how: signal.Signals, wait_s: float) -> list[int]:
    """Send one signal to each process in these networks; return those left after at most `wait_s`."""
    asked: set[int] = set()
    deadline_s = time.monotonic() + wait_s
    while left := processes_of(namespaces):
        for process_id in set(left) - asked:
            send(process_id, how)
        asked.update(left)
        if time.monotonic() >= deadline_s:
            break
        time.sleep(0.01)
    return left


def send(process_id: int, how: signal.Signals) -> None:
    """Send a signal to a process that may be gone already."""
    try:
        os.kill(process_id, how)
    except ProcessLookupError:
        return
