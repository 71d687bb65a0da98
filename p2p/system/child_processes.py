"""Ties child processes to the node: they end with it, even after kill −9 (Linux only). Counts what it kills."""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from atoll.p2p.system.control_group import group_kills

_PR_SET_PDEATHSIG: Final = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(parent: int, nice: int = 0) -> Callable[[], None] | None:
    """A `preexec_fn` that lets the kernel kill the child when process `parent` ends, where that is Linux.

    `nice`: what is added to the child's niceness. None where there is nothing to do.
    """
    add_nice = os.nice

    def be_nice() -> None:
        if nice:
            add_nice(nice)

    if _libc is None:
        return be_nice if nice else None
    prctl, getppid, leave = _libc.prctl, os.getppid, os._exit

    def ask_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if getppid() != parent:  # the parent died before the request reached the kernel
            leave(1)
        be_nice()

    return ask_kernel


def kernel_kills(counters: Path = Path("/proc/vmstat"), group: Callable[[], int | None] = group_kills) -> int:
    """A count that rises with each process that the kernel ends for lack of memory; 0 where it does not say.

    The machine's count and that of this process's control group together: some kernels have only one of them.
    """
    count = group() or 0
    with contextlib.suppress(OSError, ValueError):
        said = dict(line.split() for line in counters.read_text().splitlines())
        count += int(said.get("oom_kill", 0))
    return count
