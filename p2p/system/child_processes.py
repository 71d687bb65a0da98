"""Ties child processes to the node: they end with it, even after kill −9 (Linux only)."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
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
