"""The heap of the C library, kept steady for hours: one arena for all threads, its free end kept, other free
pages given back.

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
KEPT_END_BYTES: Final = 16 << 20
"""Freed memory at the heap's end that `keep_heap_end` leaves there: a step of `tiny` moves it by about 5 MB."""
_M_ARENA_MAX: Final = -8
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def use_one_arena() -> None:
    """Let all threads to come allocate from the arena of the first one. Call it before there are others."""
    if _libc is not None and hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_ARENA_MAX, 1)


def keep_heap_end() -> None:
    """Let freed memory at the end of the heap stay for the next step, up to 16 MiB. Call it before there is any.

    glibc gives it back from twice the largest mapping on that was freed so far, and maps what is as large as that
    one (mallopt(3), M_MMAP_THRESHOLD). A step of a small model then gives megabytes back and takes them again. A
    fixed limit would bind large models too, whose mappings raise it; one that is freed here is where it begins.
    """
    if _libc is not None and hasattr(_libc, "mallopt"):
        _libc.malloc.restype = ctypes.c_void_p
        _libc.free(ctypes.c_void_p(_libc.malloc(ctypes.c_size_t(KEPT_END_BYTES // 2))))


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
