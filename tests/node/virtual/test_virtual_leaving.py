"""Whole nodes that leave, also in one moment: what only they have goes to those that stay first."""

import asyncio
import itertools

import pytest

from atoll.node.config.roles import Work
from atoll.node.daemon.leaving.holders import IN_VAIN_S
from atoll.p2p.transports.memory.virtual_time import run_virtual

TRAINERS, ROUNDS = 3, 60
SEEDS, RELAYS = Work(trains=False), Work(trains=False, has_model=False)
LOADS_S = 90.0
"""A worker's start on a machine that has much else to do: more than four leases of these worlds."""


async def stop_at_once(world, numbers, apart_s=0.0):
    """Stop nodes in one moment, or each `apart_s` seconds after the one before; the seconds that it took."""

    async def stop(place, number):
        await asyncio.sleep(place * apart_s)
        await world.stop(number)

    now = asyncio.get_running_loop().time
    began_s = now()
    async with asyncio.TaskGroup() as group:
        for place, number in enumerate(numbers):
            group.create_task(stop(place, number))
    return now() - began_s


def newest(world, numbers):
    return max(world.nodes[number].worker.final for number in numbers)


def newcomer(world, number, gone):
    """A node that joins when the others are gone; it knows only addresses of those that stayed."""
    for other in gone:
        world.hosts.pop(other)
    return world.start(number)


SLOW = pytest.mark.slow(slice="test_members_that_leave_in_one_moment_leave_a_run_that_a_newcomer_goes_on_with")
MOMENTS = [(2, 0.0, 0.02), (3, 0.4, 1.0), (2, 2.0, 1.0)]
OTHER_MOMENTS = sorted({*itertools.product([2, 3], [0.0, 0.4, 2.0], [0.02, 1.0])} - {*MOMENTS})


@pytest.mark.parametrize(
    ("trainers", "apart_s", "latency_s"), [*MOMENTS, *(pytest.param(*one, marks=SLOW) for one in OTHER_MOMENTS)]
)
def test_members_that_leave_in_one_moment_leave_a_run_that_a_newcomer_goes_on_with(
    world, trainers, apart_s, latency_s
):
    async def story() -> None:
        async with world(ROUNDS, 1, latency_s=latency_s) as w:
            for number in range(trainers):
                w.start(number)
            await w.until(lambda: w.nodes[0].worker.final >= 3)
            keeper = w.start(9, work=SEEDS)
            await w.until(lambda: keeper.peer in w.nodes[0].driver.leases.members, look_s=0.01)
            await asyncio.sleep(4.0)
            await stop_at_once(w, range(trainers), apart_s)
            final = newest(w, range(trainers))
            late = newcomer(w, 20, range(trainers))
            await w.until(lambda: late.worker.final >= final + 3, limit_s=300.0)
            w.check_agreement()

    run_virtual(story())


def test_they_wait_for_a_seeder_whose_worker_loads_for_longer_than_a_lease(world):
    """The leases are renewed meanwhile: the seeder finds the snapshots by them, since payloads are gone."""

    async def story() -> None:
        async with world(ROUNDS, 1) as w:
            for number in range(TRAINERS):
                w.start(number)
            await w.until(lambda: w.nodes[0].worker.final >= 13)
            keeper = w.start(9, work=SEEDS)
            await w.until(lambda: bool(keeper.works), look_s=0.01)
            async with asyncio.TaskGroup() as group:
                group.create_task(keeper.crash_worker(LOADS_S))
                await w.until(lambda: keeper.peer in w.nodes[0].driver.leases.members, look_s=0.01)
                took_s = await stop_at_once(w, range(TRAINERS))
            assert LOADS_S - 10 < took_s < LOADS_S + 30
            final = newest(w, range(TRAINERS))
            assert keeper.worker.final >= final
            late = newcomer(w, 20, range(TRAINERS))
            await w.until(lambda: late.worker.final >= final + 3, limit_s=300.0)
            w.check_agreement()

    run_virtual(story())


@pytest.mark.parametrize("trainers", [1, 2])
def test_who_leaves_last_stays_until_a_seeder_has_the_state(world, trainers):
    async def story() -> None:
        async with world(ROUNDS, 1, latency_s=1.0) as w:
            for number in range(trainers):
                w.start(number)
            last = w.nodes[0]
            await w.until(lambda: last.worker.final >= 3)
            seeder = w.start(2, work=SEEDS)
            await w.until(lambda: seeder.peer in last.driver.leases.members, look_s=0.01)
            assert seeder.worker.final < last.worker.final - 1, "it has begun to fetch"
            for number in reversed(range(trainers)):
                await w.stop(number)
            late = w.start(3)
            await w.until(lambda: late.worker.final >= 8)
            w.check_agreement()

    run_virtual(story())


def test_who_leaves_waits_for_nobody_where_others_have_the_state(world):
    async def story() -> None:
        async with world(ROUNDS, TRAINERS) as w:
            for number in range(TRAINERS):
                w.start(number)
            await w.until(lambda: w.nodes[0].worker.final >= 3)
            began = asyncio.get_running_loop().time()
            await w.stop(0)
            assert asyncio.get_running_loop().time() - began < 1, "a few round trips"

    run_virtual(story())


def test_a_seeder_that_leaves_hands_the_model_to_a_newcomer_first(world):
    async def story() -> None:
        async with world(ROUNDS, 1, latency_s=1.0) as w:
            w.start(0)
            await w.until(lambda: w.nodes[0].worker.final >= 3)
            keeper = w.start(9, work=SEEDS)
            await w.until(lambda: keeper.worker.final >= 3)
            await w.stop(0)
            final = keeper.worker.final
            late = newcomer(w, 20, [0])
            await w.until(lambda: late.peer in keeper.driver.leases.members, look_s=0.01)
            assert late.worker.final < final
            await w.stop(9)
            assert late.worker.final >= final
            await w.until(lambda: late.worker.final >= final + 3, limit_s=300.0)
            w.check_agreement()

    run_virtual(story())


def test_where_only_a_relay_stays_nobody_waits_for_it_to_take_the_model(world):
    async def story() -> None:
        async with world(ROUNDS, 1) as w:
            for number in range(2):
                w.start(number)
            relay = w.start(9, work=RELAYS)
            await w.until(lambda: w.nodes[0].worker.final >= 3 and relay.driver.round.final >= 3)
            await w.stop(1)
            assert IN_VAIN_S <= await stop_at_once(w, [0]) < IN_VAIN_S + 5

    run_virtual(story())


def test_a_newcomer_beside_a_seeder_without_the_model_says_what_it_waits_for(world):
    async def story() -> None:
        async with world(ROUNDS, 1) as w:
            w.start(0)
            await w.until(lambda: w.nodes[0].worker.final >= 3)
            keeper = w.start(9, work=SEEDS)
            await w.until(lambda: bool(keeper.works), look_s=0.01)
            async with asyncio.TaskGroup() as group:
                group.create_task(keeper.crash_worker(60.0))
                await w.until(lambda: w.nodes[0].peer in keeper.driver.leases.members)
                await w.until(lambda: keeper.driver.finality.last_final >= 3)
                await w.kill(0)
                final = keeper.driver.finality.last_final
                late = newcomer(w, 20, [0])
                told = f"waiting for the model of round {final}: no member that is here offers it"
                await w.until(lambda: late.driver is not None)
                await w.until(lambda: late.driver.view().waiting == told, limit_s=120.0)
            again = w.start(0)
            await w.until(lambda: late.worker.final >= final + 3, limit_s=300.0)
            assert again.worker.final >= final
            w.check_agreement()

    run_virtual(story())


SEEDERS_SLOW = pytest.mark.slow(slice="test_seeders_that_leave_in_one_moment_do_not_count_on_each_other")


@pytest.mark.parametrize(
    ("count", "apart_s", "latency_s"),
    [*MOMENTS, *(pytest.param(*one, marks=SEEDERS_SLOW) for one in OTHER_MOMENTS)],
)
def test_seeders_that_leave_in_one_moment_do_not_count_on_each_other(world, count, apart_s, latency_s):
    """A seeder writes nothing into the ledger. That it leaves, its lease says."""
    numbers = range(7, 7 + count)

    async def story() -> None:
        async with world(ROUNDS, 1, latency_s=latency_s) as w:
            w.start(0)
            await w.until(lambda: w.nodes[0].worker.final >= 8)
            seeders = [w.start(number, work=SEEDS) for number in numbers]
            await w.until(lambda: all(seeder.worker.final >= 8 for seeder in seeders))
            await w.stop(0)
            final = newest(w, numbers)
            late = newcomer(w, 20, [0])
            for seeder in seeders:
                await w.until(lambda to=seeder: late.peer in to.driver.leases.members, look_s=0.01)
            assert late.worker.final < final
            async with asyncio.TaskGroup() as group:
                group.create_task(late.crash_worker(LOADS_S))
                await stop_at_once(w, numbers, apart_s)
            # It has what it needs, if not yet the worker to apply it.
            await w.until(lambda: late.worker.final >= final + 3, limit_s=300.0)
            w.check_agreement()

    run_virtual(story())
