"""Ties child processes to the node, which they do not outlive (after kill −9: on Linux), and ends them."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from atoll.p2p.system.control_group import group_kills

PIPES_S: Final = 2.0
"""Deadline of reading the rest of what an ended child printed."""
_PIECE_BYTES: Final = 64 * 1024
_LOOK_S: Final = 0.02
_PR_SET_PDEATHSIG: Final = 1
_SESSION: Final = "/proc/self/autogroup"
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(parent: int, nice: int = 0) -> Callable[[], None] | None:
    """A `preexec_fn` that lets Linux kill the child when process `parent` ends; None where there is nothing to do.

    `nice`: added to the child's niceness, and that of a session which it begins: Linux may compare sessions first.
    """
    add_nice, begin_session, open_file, write = os.nice, os.setsid, os.open, os.write

    def be_nice() -> None:
        if nice:
            niceness = add_nice(nice)
            with contextlib.suppress(OSError):  # asyncio has done it by now; uvloop would do it after this
                begin_session()
            with contextlib.suppress(OSError):
                write(open_file(_SESSION, os.O_WRONLY | os.O_CLOEXEC), b"%d" % niceness)

    if _libc is None:
        return be_nice if nice else None
    prctl, getppid, leave = _libc.prctl, os.getppid, os._exit

    def ask_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if getppid() != parent:  # the parent died before the request reached the kernel
            leave(1)
        be_nice()

    return ask_kernel


async def end_child(process: asyncio.subprocess.Process) -> None:
    """Kill a child unless it has ended, and wait until it is gone. What it printed and nobody read is lost.

    A caller that is cancelled meanwhile waits too: a killed process is gone in moments, if not within PIPES_S.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    # `process.wait` would not do: asyncio's loop of Python 3.11 waits for the ends of the pipes, too. A pipe whose
    # buffer is full is not read to its end, and a child of the child may hold it open for ever.
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(_drop_output(process))
        try:
            await _gone(process)
        except asyncio.CancelledError:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(_gone(process), PIPES_S)
            raise
        await asyncio.wait([reading], timeout=PIPES_S)
        reading.cancel()


async def _gone(process: asyncio.subprocess.Process) -> None:
    while process.returncode is None:  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_S)


async def _drop_output(process: asyncio.subprocess.Process) -> None:
    while process.stdout is not None and await process.stdout.read(_PIECE_BYTES):
        pass


def kernel_kills(counters: Path = Path("/proc/vmstat"), group: Callable[[], int | None] = group_kills) -> int:
    """A count that rises with each process that the kernel ends for lack of memory; 0 where it does not say.

    The machine's count and that of this process's control group together: some kernels have only one of them.
    """
    count = group() or 0
    with contextlib.suppress(OSError, ValueError):
        said = dict(line.split() for line in counters.read_text().splitlines())
        count += int(said.get("oom_kill", 0))
    return count
