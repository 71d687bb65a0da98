"""Child processes that must not outlive the node, however it ends."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(parent: int) -> Callable[[], None] | None:
    """`preexec_fn` after which the kernel kills the child when `parent` is gone (Linux); None elsewhere."""
    if _libc is None:
        return None
    prctl, getppid, leave = _libc.prctl, os.getppid, os._exit

    def ask_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if getppid() != parent:  # it died before the kernel knew
            leave(1)

    return ask_kernel
