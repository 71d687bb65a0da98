"""Stops nodes between two system calls and lets them go on: nothing reaches the disk meanwhile but what had to."""

import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

import psutil

from tests.waiting import poll


class Running(Protocol):
    """A node of the simulation or of the lab."""

    def processes(self) -> Sequence[psutil.Process]: ...


@contextmanager
def stopped(nodes: Iterable[Running]) -> Iterator[None]:
    """While the block runs, no process of these nodes does anything."""
    processes = [process for node in nodes for process in node.processes()]
    try:
        for process in processes:
            _signal(process, signal.SIGSTOP)
        # A signal waits for the end of an fsync that is under way.
        poll("all threads are stopped", lambda: all(map(_is_stopped, processes)))
        yield
    finally:
        for process in processes:
            _signal(process, signal.SIGCONT)


def stop_process(pid: int) -> None:
    """Stop a process, and wait until it stands still: `os.kill` returns while threads of it may answer on."""
    process = psutil.Process(pid)
    process.send_signal(signal.SIGSTOP)
    poll(f"all threads of {pid} are stopped", lambda: _is_stopped(process))


def _signal(process: psutil.Process, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process.pid, number)


def _is_stopped(process: psutil.Process) -> bool:
    """Whether every thread of it is; a process that is gone does nothing either."""
    try:
        for task in os.listdir(f"/proc/{process.pid}/task"):
            with open(f"/proc/{process.pid}/task/{task}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] not in "TtZX":
                    return False
    except (FileNotFoundError, ProcessLookupError):
        return not process.is_running()
    return True
