"""The virtual clock jumps, and two runs take the same steps."""

import asyncio
import random
import time

import pytest

from atoll.p2p.transports.memory.virtual_time import Stuck, run_virtual


def test_days_pass_in_no_time():
    async def main():
        start_s = asyncio.get_running_loop().time()
        await asyncio.sleep(3 * 86400)
        return asyncio.get_running_loop().time() - start_s

    real_s = time.monotonic()
    assert run_virtual(main()) == pytest.approx(3 * 86400)
    assert time.monotonic() - real_s < 3600, "three days on the virtual clock"


def test_timeouts_and_order_of_timers():
    async def main():
        order = []

        async def one(delay_s):
            await asyncio.sleep(delay_s)
            order.append(delay_s)

        async with asyncio.TaskGroup() as group:
            for delay_s in (5, 1, 3):
                group.create_task(one(delay_s))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await asyncio.sleep(61)
        return order, asyncio.get_running_loop().time()

    order, now_s = run_virtual(main())
    assert order == [1, 3, 5]
    assert now_s == pytest.approx(65)


def test_a_deadlock_is_an_error():
    async def main():
        await asyncio.Event().wait()

    with pytest.raises(Stuck):
        run_virtual(main())


def test_executor_functions_run_in_line():
    async def main():
        assert await asyncio.to_thread(lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)

    run_virtual(main())


def test_sets_of_tasks_iterate_in_one_order():
    async def main():
        cancelled = []

        async def one(number):
            try:
                await asyncio.sleep(1000)
            finally:
                cancelled.append(number)

        async def fail():
            async with asyncio.TaskGroup() as group:
                for number in range(50):
                    group.create_task(one(number))
                await asyncio.sleep(1)
                raise ZeroDivisionError

        with pytest.raises(ExceptionGroup):
            await fail()
        return cancelled

    first = run_virtual(main())
    junk = [object() for _ in range(1000)]  # move the heap, so that addresses differ
    assert run_virtual(main()) == first
    assert len(junk) == 1000


def test_the_seed_decides_the_random_module_and_is_put_back():
    async def draw():
        return random.random()

    random.seed(99)
    expected = random.random()
    random.seed(99)
    assert run_virtual(draw(), 1) == run_virtual(draw(), 1) != run_virtual(draw(), 2)
    assert random.random() == expected


def test_errors_come_out():
    async def main():
        await asyncio.sleep(1)
        raise LookupError("here")

    with pytest.raises(LookupError, match="here"):
        run_virtual(main())
