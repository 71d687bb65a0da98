"""Whole nodes (driver, ledger, blobs, gossip) on the simulated network and virtual time."""

import asyncio
from collections.abc import Callable

import pytest

from atoll.p2p.transports.memory.virtual_time import run_virtual

Worlds = Callable[..., object]


def test_four_nodes_agree_on_every_round(world):
    async def story() -> None:
        async with world(6, 4) as w:
            for number in range(4):
                w.start(number)
            await w.until(w.all_final)
            w.check_agreement()
            await w.check_feeds()
            for node in w.nodes.values():
                assert node.worker.trained == list(range(6))
                assert node.driver.is_finished
                sets = [len(row.contributors) for row in node.driver.context.log.rows.values()]
                assert sets == [4] * 6

    run_virtual(story())


@pytest.mark.parametrize("overlap_steps", [0, 10])
def test_one_node_alone_makes_progress(world, overlap_steps):
    async def story() -> None:
        async with world(5, 1, overlap_steps=overlap_steps) as w:
            node = w.start(0)
            took_s = await w.until(w.all_final)
            assert node.worker.trained == list(range(5))
            assert took_s < 5 * 10.0 * 1.2

    run_virtual(story())


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_node_comes_back_and_contributes_again(world, victim):
    async def story() -> None:
        async with world(14, 4) as w:
            for number in range(4):
                w.start(number)
            await w.until(lambda: w.newest() >= 4)
            await asyncio.sleep(3.0)
            await w.kill(victim)
            killed_at = max(w.nodes[victim].worker.trained)
            took_s = await w.until(lambda: min(n.worker.final for n in w.nodes.values() if n.task) >= killed_at)
            assert took_s < 3 * 20.0 + 20.0, "progress within three round times and a lease"
            await w.until(lambda: w.newest() >= 8)
            w.start(victim)
            await w.until(w.all_final)
            w.check_agreement()
            await w.check_feeds()
            assert max(w.nodes[victim].worker.trained) == 13
            assert len(set(w.nodes[victim].worker.trained)) == len(w.nodes[victim].worker.trained)

    run_virtual(story())


@pytest.mark.parametrize("overlap_steps", [0, 10])
def test_a_late_joiner_adopts_a_snapshot_and_contributes(world, overlap_steps):
    async def story() -> None:
        async with world(16, 3, overlap_steps=overlap_steps) as w:
            for number in range(3):
                w.start(number)
            await w.until(lambda: w.newest() >= 9)
            late = w.start(7)
            await w.until(w.all_final)
            w.check_agreement()
            assert min(late.worker.trained) >= 9
            assert max(late.worker.trained) == 15
            last = w.nodes[0].driver.context.log.rows[15]
            assert late.peer in last.contributors

    run_virtual(story())


def test_a_healed_partition_has_one_digest(world):
    async def story() -> None:
        async with world(16, 4) as w:
            for number in range(4):
                w.start(number)
            await w.until(lambda: w.newest() >= 3)
            sides = [w.nodes[n].peer for n in (0, 1)], [w.nodes[n].peer for n in (2, 3)]
            w.network.cut(*sides)
            await asyncio.sleep(60.0)
            w.network.heal()
            await w.until(w.all_final)
            w.check_agreement()
            await w.check_feeds()

    run_virtual(story())


@pytest.mark.parametrize("overlap_steps", [0, 10])
def test_all_nodes_die_and_resume(world, overlap_steps):
    async def story() -> None:
        async with world(10, 3, overlap_steps=overlap_steps) as w:
            for number in range(3):
                w.start(number)
            await w.until(lambda: w.newest() >= 4)
            before = max(n.worker.final for n in w.nodes.values())
            for number in range(3):
                await w.kill(number)
            for number in (2, 0, 1):
                w.start(number)
            await w.until(w.all_final)
            assert before >= 2
            w.check_agreement()
            await w.check_feeds()

    run_virtual(story())


@pytest.mark.slow(
    slice=(
        "tests/bench/test_simulator.py::test_a_slice_of_seeds_breaks_no_promise, "
        "test_a_healed_partition_has_one_digest"
    )
)
def test_twenty_nodes_with_churn(world):
    """Different speeds, two deaths with return, two newcomers, a partition that heals."""

    async def story() -> None:
        async with world(12, 18) as w:
            for number in range(18):
                w.start(number, train_s=8.0 + 0.3 * number)
            await w.until(lambda: w.newest() >= 2)
            await w.kill(3)
            await w.kill(11)
            w.start(18, train_s=9.0)
            await w.until(lambda: w.newest() >= 5)
            w.start(3)
            w.start(11)
            w.start(19, train_s=14.0)
            peers = [node.peer for node in w.nodes.values()]
            w.network.cut(peers[:6], peers[6:])
            await asyncio.sleep(40.0)
            w.network.heal()
            await w.until(w.all_final)
            w.check_agreement()
            await w.check_feeds()
            last = w.nodes[0].driver.context.log.rows[11]
            assert len(last.contributors) >= 14

    run_virtual(story())
