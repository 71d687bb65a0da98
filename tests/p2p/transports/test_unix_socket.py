"""The Unix connection to p2pd: on the loop of `node start` and on asyncio's own."""

import asyncio
import contextlib
import socket
import tempfile
import tracemalloc
from pathlib import Path

import pytest
import uvloop

from atoll.p2p.transports.p2pd.unix_socket import (
    READS_AT_ONCE,
    UnixSocket,
    accepted,
    listen_at,
    take_streams,
)
from tests.waiting import HANGS_S

BRIEF_S = HANGS_S / 20  # a mutant runs two tests into it
LOOPS = pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop])


def run(loop, work):
    """`work(ours, theirs)` over a pair of sockets."""

    async def within():
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        async with asyncio.timeout(BRIEF_S):
            with theirs:
                found = UnixSocket(ours)
                try:
                    await work(found, theirs)
                finally:
                    found.abort()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(within())


@LOOPS
@pytest.mark.parametrize("sizes", [(1,), (4,), (1, 1), (4, 1, 3)])
def test_the_end_is_a_reset_for_p2pd_though_all_was_read(loop, sizes):
    async def work(found, theirs):
        for size in sizes:
            theirs.send(bytes(range(size)))
            assert await found.readexactly(size) == bytes(range(size))
        found.abort()
        with pytest.raises(ConnectionResetError):
            theirs.recv(1)

    run(loop, work)


@LOOPS
def test_p2pd_still_gets_what_was_written_before_the_reset(loop):
    async def work(found, theirs):
        theirs.send(b"?")
        await found.readexactly(1)
        await found.write(b"answer")
        found.abort()
        assert theirs.recv(100) == b"answer"

    run(loop, work)


@LOOPS
def test_bytes_come_once_and_in_order_however_they_arrive(loop):
    async def work(found, theirs):
        sent = bytes(range(200))

        async def send():
            for at in range(0, 100, 7):
                theirs.send(sent[at : min(at + 7, 100)])
                await asyncio.sleep(0)

        assert await asyncio.gather(found.readexactly(100), send()) == [sent[:100], None]
        theirs.send(sent[100:])
        assert await found.read(30) == sent[100:130]
        assert [await found.readexactly(size) for size in (0, 1, 1, 60)] == [
            b"",
            sent[130:131],
            sent[131:132],
            sent[132:192],
        ]
        theirs.close()
        with pytest.raises(asyncio.IncompleteReadError) as short:
            await found.readexactly(9)
        assert short.value.partial == sent[192:]
        assert await found.read(1) == b""

    run(loop, work)


@LOOPS
def test_a_read_that_is_cancelled_loses_nothing(loop):
    async def work(found, theirs):
        theirs.send(b"abc")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await found.readexactly(5)
        theirs.send(b"de")
        assert await found.readexactly(2) == b"ab"
        assert await found.readexactly(3) == b"cde"

    run(loop, work)


@LOOPS
def test_bytes_that_are_there_already_keep_nobody_waiting(loop):
    async def work(found, theirs):
        theirs.send(bytes(2 * READS_AT_ONCE))
        turn = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(turn.set_result, None)
        for _ in range(2 * READS_AT_ONCE):
            await found.readexactly(1)
        assert turn.done()

    run(loop, work)


@LOOPS
def test_an_end_wakes_who_waits_for_bytes_or_for_room(loop):
    async def work(found, theirs):
        waiting = asyncio.gather(found.readexactly(1), found.write(bytes(1 << 20)), return_exceptions=True)
        await asyncio.sleep(0)
        found.abort()
        assert found.is_closing()
        assert [str(error) for error in await waiting] == ["the connection is closed"] * 2

    run(loop, work)


@LOOPS
def test_a_write_that_was_cut_off_is_followed_by_no_other(loop):
    async def work(found, theirs):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await found.write(bytes(1 << 20))
        with pytest.raises(OSError, match="cut off"):
            await found.write(b"x")

    run(loop, work)


@LOOPS
def test_all_streams_that_wait_are_taken_in_one_turn(loop):
    """A turn of a busy loop takes milliseconds, and p2pd ends a stream that finds the kernel's queue full."""

    async def take(folder, ends):
        listener = ends.enter_context(listen_at(Path(folder) / "streams"))
        for _ in range(50):
            ends.enter_context(socket.socket(socket.AF_UNIX)).connect(listener.getsockname())
        assert len([ends.enter_context(each) for each in await accepted(listener)]) == 50

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ends:
        runner = ends.enter_context(asyncio.Runner(loop_factory=loop))
        runner.run(take(folder, ends))


class Ending:
    """A task group that ends: its tasks are cancelled before they begin."""

    def create_task(self, work):
        task = asyncio.get_running_loop().create_task(work)
        task.cancel()
        return task


@LOOPS
def test_a_stream_whose_task_is_cancelled_before_it_begins_is_closed(loop):
    async def serve(found):
        pytest.fail("it began")

    async def take(folder, ends):
        listener = listen_at(Path(folder) / "streams")
        ours = ends.enter_context(socket.socket(socket.AF_UNIX))
        ours.connect(listener.getsockname())
        ours.setblocking(False)
        async with asyncio.TaskGroup() as group, asyncio.timeout(BRIEF_S):
            taking = group.create_task(take_streams(listener, Ending(), serve))
            assert await asyncio.get_running_loop().sock_recv(ours, 1) == b""
            taking.cancel()
        assert listener.fileno() < 0

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ends:
        runner = ends.enter_context(asyncio.Runner(loop_factory=loop))
        runner.run(take(folder, ends))


def over_a_full_queue(loop, work):
    """`work(path, listener)` with a listener whose queue holds one connection, and is full."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ends:
        path = str(Path(folder) / "control")
        listener = ends.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen(0)
        ends.enter_context(socket.socket(socket.AF_UNIX)).connect(path)
        runner = ends.enter_context(asyncio.Runner(loop_factory=loop))
        runner.run(asyncio.wait_for(work(path, listener), BRIEF_S))


@LOOPS
def test_a_connect_waits_for_a_place_in_a_full_queue(loop):
    async def work(path, listener):
        async with asyncio.TaskGroup() as group:
            connecting = group.create_task(UnixSocket.connect(path, full_s=BRIEF_S))
            assert not (await asyncio.wait([connecting], timeout=0.05))[0], "nobody was accepted"
            listener.accept()[0].close()
        found = connecting.result()
        await found.write(b"x")
        with listener.accept()[0] as theirs:
            assert theirs.recv(1) == b"x"
        found.abort()

    over_a_full_queue(loop, work)


@LOOPS
def test_a_queue_that_stays_full_is_an_error_that_says_so(loop):
    async def work(path, listener):
        with pytest.raises(ConnectionRefusedError, match=r"its queue was full for 0\.05 s"):
            await UnixSocket.connect(path, full_s=0.05)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await UnixSocket.connect(path, full_s=BRIEF_S)

    over_a_full_queue(loop, work)


def test_bytes_that_come_one_by_one_cost_no_more_memory_than_was_asked_for():
    size = 4000

    async def work(found, theirs):
        async with asyncio.TaskGroup() as group:
            tracemalloc.start()
            reading = group.create_task(found.readexactly(size))
            for _ in range(size - 1):
                theirs.send(b"x")
                await asyncio.sleep(0)
            held = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
            theirs.send(b"y")
        assert reading.result() == b"x" * (size - 1) + b"y"
        assert held < 8 * size, "a list of parts held 42 bytes for each"

    run(asyncio.new_event_loop, work)
