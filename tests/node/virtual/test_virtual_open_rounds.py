"""Whole nodes: voters vanish in short rounds, and the others train on through hundreds of open rounds."""

import asyncio

import pytest

from atoll.node.daemon.rounds.state import Phase
from atoll.node.runs.capacity.open_rounds import ANY_DISK, LEAST_ROUNDS, OpenRounds
from atoll.p2p.transports.memory.virtual_time import run_virtual

PACE = {"quorum_256": 192, "grace_256": 128, "lease_s": 60.0}
"""The presets' pace."""
ROUND_S = 0.2
FEW = OpenRounds(payloads=0)
"""The bound of a node that gives nothing of its disk: 64 rounds."""


async def vanish(w, count, *gone, few=-1, round_s=ROUND_S):
    """Nodes train together, one with the bound FEW; these vanish at once. The newest round then."""
    for number in range(count):
        w.start(number, round_s).open_rounds = FEW if number == few else ANY_DISK
    await w.until(lambda: min(node.worker.final for node in w.nodes.values()) >= 6, look_s=0.1)
    for number in gone:
        await w.kill(number)
    return w.newest()


async def watch(w, *numbers, rests=-1):
    """Until nearly all rounds are final again: how long one node rested, and the most rounds each had open.

    Fails as soon as another one rests.
    """
    rested, most = 0.0, dict.fromkeys(numbers, 0)
    while min(most.values()) < LEAST_ROUNDS - 4 or any(_open(w, number) > 4 for number in numbers):
        await asyncio.sleep(ROUND_S / 4)
        for number in numbers:
            most[number] = max(most[number], _open(w, number))
            if w.nodes[number].driver.round.phase is Phase.FULL:
                assert number == rests, w.describe()
                rested += ROUND_S / 4
    return rested, most


def _open(w, number):
    state = w.nodes[number].driver.round
    return state.round - state.final - 1


def test_a_survivor_of_three_trains_through_the_lease_and_decides_all_open_rounds(world):
    async def story() -> None:
        async with world(4000, 3, latency_s=0.005, **PACE) as w:
            before = await vanish(w, 3, 1, 2)
            began = asyncio.get_running_loop().time()
            rested, most = await watch(w, 0)
            alone_s = asyncio.get_running_loop().time() - began
            assert rested == 0.0
            assert most[0] > w.spec.pace.lease_s / ROUND_S * 0.8
            assert w.newest() - before > 0.8 * alone_s / ROUND_S, "saves and folds take the rest"
            w.start(1, ROUND_S)
            there = w.newest()
            await w.until(lambda: min(w.nodes[number].worker.final for number in (0, 1)) > there + 10)
            w.check_agreement()
            await w.check_feeds()
            assert not w.changes

    run_virtual(story())


WITHOUT = pytest.mark.slow(slice="test_nodes_of_different_bounds_decide_the_same_sets[4]")


@pytest.mark.parametrize("overlap_steps", [pytest.param(0, marks=WITHOUT), 4])
def test_nodes_of_different_bounds_decide_the_same_sets(world, overlap_steps):
    """Of four nodes two vanish. One of the others has room for 64 rounds: it rests, and decides all the same."""

    async def story() -> None:
        pace = {**PACE, "lease_s": 20.0}
        async with world(4000, 4, latency_s=0.005, overlap_steps=overlap_steps, **pace) as w:
            await vanish(w, 4, 2, 3, few=1, round_s=ROUND_S / 2)
            rested, most = await watch(w, 0, 1, rests=1)
            assert rested > 0.0
            assert most[0] > 2 * LEAST_ROUNDS
            assert most[1] <= LEAST_ROUNDS
            there = w.newest()
            w.start(2, ROUND_S)
            await w.until(lambda: min(w.nodes[number].worker.final for number in range(3)) > there + 10)
            newest = w.nodes[0].driver.context.log.newest_final
            await w.until(lambda: len(newest().contributors) == 3)
            w.check_agreement()
            await w.check_feeds()

    run_virtual(story())


def test_a_survivor_that_restarts_with_many_open_rounds_goes_on_from_them(world):
    """It folds them again, waits for a lease as every node that came up, and contributes to none twice."""

    async def story() -> None:
        async with world(4000, 2, latency_s=0.005, **{**PACE, "lease_s": 20.0}) as w:
            await vanish(w, 2, 1, round_s=ROUND_S / 2)
            await w.until(lambda: _open(w, 0) > 2 * LEAST_ROUNDS)
            was = w.nodes[0].driver.round.round
            await w.kill(0)
            w.start(0, ROUND_S / 2)
            await w.until(lambda: w.nodes[0].driver.round.phase is Phase.TRAIN, look_s=0.05)
            assert abs(w.nodes[0].driver.round.round - was) <= 1
            _, most = await watch(w, 0)
            assert most[0] > LEAST_ROUNDS, "it began while so many were open"
            w.check_agreement()
            await w.check_feeds()

    run_virtual(story())


def test_a_cut_shorter_than_a_lease_leaves_the_work_of_both_sides_in_many_open_rounds(world):
    async def story() -> None:
        async with world(4000, 2, latency_s=0.005, **{**PACE, "lease_s": 40.0}) as w:
            await vanish(w, 2, round_s=ROUND_S / 2)
            w.network.cut([w.nodes[0].peer], [w.nodes[1].peer])
            await w.until(lambda: min(_open(w, 0), _open(w, 1)) > 1.5 * LEAST_ROUNDS, limit_s=40.0)
            w.network.heal()
            healed = w.newest()
            finals = lambda: [node.worker.final for node in w.nodes.values()]  # noqa: E731
            await w.until(lambda: min(finals()) > healed + 5, limit_s=120.0)
            rows = w.nodes[0].driver.context.log.rows
            assert {len(rows[number].contributors) for number in range(healed - 80, healed - 10)} == {2}
            w.check_agreement()
            await w.check_feeds()
            assert not w.changes

    run_virtual(story())
