"""Threads of a node share one arena of the C library's heap, and free pages go back to the system."""

import asyncio
import subprocess
import sys

import pytest

from atoll.p2p.system import c_heap
from atoll.p2p.system.c_heap import GIVEN_BACK_S, FreePages
from atoll.p2p.transports.memory.virtual_time import run_virtual

if sys.platform != "linux" or not hasattr(c_heap._libc, "malloc_info"):
    pytestmark = pytest.mark.skip("the heap is another one than glibc's")

THREADS = """
import ctypes, sys, threading
from atoll.p2p.system import c_heap
{before}
def read():
    for size in range(20_000, 100_000, 10_000):
        bytearray(size)
    reached.wait(), done.wait()
reached, done = threading.Barrier(5), threading.Barrier(5)
threads = [threading.Thread(target=read) for _ in range(4)]
for thread in threads:
    thread.start()
reached.wait()
libc, path = c_heap._libc, sys.argv[1]
libc.fopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fopen(path.encode(), b"w"))
libc.malloc_info(0, file), libc.fclose(file)
print(open(path).read().count("<heap "))
done.wait()
"""
STEPS = """
import ctypes, resource
from atoll.p2p.system import c_heap
libc = c_heap._libc
{before}
libc.malloc.restype = ctypes.c_void_p
libc.memset.argtypes = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
def step():
    "Twelve megabytes that are taken one after the other and given back."
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pieces = [libc.malloc(2 << 20) for _ in range(6)]
    for piece in pieces:
        libc.memset(piece, 1, 2 << 20)
    for piece in reversed(pieces):
        libc.free(ctypes.c_void_p(piece))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
steps = [step() for _ in range(4)]
print(steps[-1])
"""
HOLES = """
from atoll.p2p.system.c_heap import GIVEN_BACK_S, FreePages
def held_mb():
    return next(int(line.split()[1]) / 1e3 for line in open("/proc/self/status") if line.startswith("RssAnon"))
def with_holes():
    "A large piece of the heap that is free, between small ones that are not."
    pieces = [bytearray(30_000) for _ in range(1000)]
    return pieces[::20]
clock = [1000.0]
pages = FreePages(lambda: clock[0])
for after_s in (0.0, GIVEN_BACK_S - 1, 1.0):
    clock[0] += after_s
    stays, full_mb = with_holes(), held_mb()
    pages.give_back()
    print(round(full_mb - held_mb()), end=" ")
    del stays
"""


def run_alone(script: str, *words: str) -> str:
    """What a process of its own prints."""
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=True)
    return done.stdout


def test_threads_share_the_arena_of_the_first_one(tmp_path):
    path = str(tmp_path / "info")
    assert int(run_alone(THREADS.format(before=""), path)) > 1, "this library has one arena: the call can go"
    assert int(run_alone(THREADS.format(before="c_heap.use_one_arena()"), path)) == 1


def test_what_a_step_frees_at_the_end_of_the_heap_stays_for_the_next_one():
    assert int(run_alone(STEPS.format(before=""))) > 2000, "this library keeps it: the call can go"
    assert int(run_alone(STEPS.format(before="c_heap.keep_heap_end()"))) < 100


def test_free_pages_between_used_ones_go_back_but_not_each_time():
    given_mb = [int(word) for word in run_alone(HOLES).split()]
    assert given_mb[0] >= 20, given_mb
    assert given_mb[1] <= 2, "less than a minute after"
    assert given_mb[2] >= 20, given_mb


def test_a_daemon_gives_them_back_once_a_minute(monkeypatch):
    given = list[float]()

    async def story() -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(FreePages, "give_back", lambda self: given.append(loop.time()))
        async with asyncio.timeout(3.5 * GIVEN_BACK_S):
            await FreePages(loop.time).serve()

    with pytest.raises(TimeoutError):
        run_virtual(story())
    assert [at - given[0] for at in given] == [0.0, GIVEN_BACK_S, 2 * GIVEN_BACK_S, 3 * GIVEN_BACK_S]
