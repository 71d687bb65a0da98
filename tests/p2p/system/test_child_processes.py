"""A child is gone when `end_child` returns, whatever it printed and whoever else has its pipe."""

import asyncio
import os
import sys

import pytest
import uvloop

from atoll.p2p.system import child_processes
from atoll.p2p.system.child_processes import end_child
from tests.waiting import HANGS_S, eventually

LOOPS = (asyncio.new_event_loop, uvloop.new_event_loop)
PRINTS = "print('x' * (1 << 20), flush=True); input()"
"""More than the pipe and asyncio's buffer hold: it hangs in the middle of it."""
HAS_A_CHILD = "import subprocess; print(subprocess.Popen(['sleep', '60'], stdin=-3).pid, flush=True); input()"


async def started(script: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-S", "-c", script, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )


def run(loop, scenario) -> None:
    async def limited() -> None:
        async with asyncio.timeout(HANGS_S / 15):  # a mutant runs two of these into it
            await scenario()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(limited())


def is_gone(process: asyncio.subprocess.Process) -> bool:
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return process.returncode == -9
    return False


@pytest.mark.parametrize("loop", LOOPS, ids=("asyncio", "uvloop"))
def test_one_that_fills_its_pipe_is_ended(loop):
    async def scenario() -> None:
        process = await started(PRINTS)
        await process.stdout.read(1)
        await eventually(lambda: process.stdout._paused)  # its buffer is full: nobody reads the pipe any more
        await end_child(process)
        assert is_gone(process)

    run(loop, scenario)


@pytest.mark.parametrize("loop", LOOPS, ids=("asyncio", "uvloop"))
def test_one_whose_own_child_has_the_pipe_is_ended(loop, monkeypatch):
    monkeypatch.setattr(child_processes, "PIPES_S", 0.1)

    async def scenario() -> None:
        process = await started(HAS_A_CHILD)
        other = int(await process.stdout.readline())
        try:
            await end_child(process)
            assert is_gone(process)
        finally:
            os.kill(other, 9)
            await eventually(process.stdout.at_eof)

    run(loop, scenario)


@pytest.mark.parametrize("loop", LOOPS, ids=("asyncio", "uvloop"))
def test_one_is_gone_although_its_caller_is_cancelled_meanwhile(loop):
    async def scenario() -> None:
        process = await started("print(flush=True); input()")
        await process.stdout.read(1)
        async with asyncio.TaskGroup() as group:
            ending = group.create_task(end_child(process))
            await asyncio.sleep(0)
            assert process.returncode is None, "it is about to end"
            ending.cancel()
        assert ending.cancelled()
        assert is_gone(process)

    run(loop, scenario)


def test_one_that_ended_by_itself_is_left_as_it_is():
    async def scenario() -> None:
        process = await started("raise SystemExit(7)")
        assert await process.wait() == 7
        await end_child(process)
        assert process.returncode == 7

    run(LOOPS[0], scenario)
