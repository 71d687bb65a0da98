"""Ties child processes to the node: they end with it, even after kill −9 (Linux only). Counts what it kills."""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(parent: int) -> Callable[[], None] | None:
    """A `preexec_fn` that lets the kernel kill the child when process `parent` ends; None except on Linux."""
    if _libc is None:
        return None
    prctl, getppid, leave = _libc.prctl, os.getppid, os._exit

    def ask_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if getppid() != parent:  # the parent died before the request reached the kernel
            leave(1)

    return ask_kernel


def kernel_kills(counters: Path = Path("/proc/vmstat")) -> int:
    """Number of processes that the kernel ended for lack of memory, in containers too; 0 where it does not say."""
    with contextlib.suppress(OSError, ValueError):
        said = dict(line.split() for line in counters.read_text().splitlines())
        return int(said.get("oom_kill", 0))
    return 0
