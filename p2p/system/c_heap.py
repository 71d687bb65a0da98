"""The heap of the C library, kept from growing for hours: one arena for all threads, and free pages given back.

glibc gives each thread an arena of its own. A thread that once reads a blob keeps what its arena took from the
system, one to two megabytes, and other threads cannot use it: a daemon of some hours holds that for each thread.
Within one arena the next thread uses what the last one freed. With another C library nothing happens here.
"""

import asyncio
import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

GIVEN_BACK_S: Final = 60.0
"""Seconds between two returns of free pages by a process that hardly needs them again."""
_M_ARENA_MAX: Final = -8
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def use_one_arena() -> None:
    """Let all threads to come allocate from the arena of the first one. Call it before there are others."""
    if _libc is not None and hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_ARENA_MAX, 1)


@dataclass(slots=True)
class FreePages:
    """Returns the pages of the heap that are free to the system, now and then."""

    now: Callable[[], float]
    """A clock in seconds."""
    every_s: float = GIVEN_BACK_S
    _at: float = float("-inf")

    def give_back(self) -> None:
        """Return them, unless that was less than `every_s` ago."""
        if self.now() - self._at < self.every_s:
            return
        self._at = self.now()
        if _libc is not None and hasattr(_libc, "malloc_trim"):
            _libc.malloc_trim(0)

    async def serve(self) -> None:
        """Return them every `every_s`, until cancelled."""
        while True:
            self.give_back()
            await asyncio.sleep(self.every_s)
