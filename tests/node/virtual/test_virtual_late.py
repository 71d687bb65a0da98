"""Whole nodes: who comes up in the middle of a round is done with the others, or begins with their next one."""

import asyncio

import pytest

from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.ledger.records import Contribution
from tests.node.virtual.conftest import STEPS
from tests.node.virtual.test_virtual_goodput import PACE

ROUND_S, LATE = 20.0, 3


async def come_up(w, into_s):
    """Four nodes train; one dies, and is started so long into a round. The round, and when the others began it."""
    for number in range(4):
        w.start(number, ROUND_S)
    await w.until(lambda: w.all_final(2))
    await w.kill(LATE)
    before = w.newest()
    await w.until(lambda: w.nodes[0].driver.round.round > before + 1, look_s=0.1)
    at, began = w.nodes[0].driver.round.round, asyncio.get_running_loop().time()
    await asyncio.sleep(into_s)
    w.start(LATE, ROUND_S)
    return at, began


def steps_of(w, at):
    """Steps by node of the contributions to a round."""
    numbers = {node.peer: node.number for node in w.nodes.values()}
    entries = [entry for _, entry in w.nodes[0].swarm.ledger.since(0, 1 << 20)]
    mine = [entry for entry in entries if isinstance(entry.body, Contribution) and entry.body.round == at]
    return {numbers[entry.author]: entry.body.steps for entry in mine}


@pytest.mark.parametrize("overlap_steps", [0, 4])
def test_who_comes_up_in_a_round_takes_fewer_steps_and_holds_up_nobody(world, overlap_steps):
    async def story():
        async with world(4000, 4, **PACE, overlap_steps=overlap_steps) as w:
            at, began = await come_up(w, into_s=0.4 * ROUND_S)
            await w.until(lambda: w.nodes[0].driver.round.round >= at + 3, look_s=0.1)
            assert asyncio.get_running_loop().time() - began < 3.1 * ROUND_S, "nobody waited for it"
            await w.until(lambda: w.all_final(at + 1))
            steps = steps_of(w, at)
            assert STEPS // 4 <= steps.pop(LATE) <= 0.6 * STEPS
            assert set(steps.values()) == set(steps_of(w, at + 1).values()) == {STEPS}
            rows = w.nodes[0].driver.context.log.rows
            assert [len(rows[number].contributors) for number in (at, at + 1)] == [4, 4]

    run_virtual(story())


def test_who_comes_up_near_the_end_of_a_round_begins_with_the_next(world):
    async def story():
        async with world(4000, 4, **PACE) as w:
            at, began = await come_up(w, into_s=0.85 * ROUND_S)
            await w.until(lambda: w.nodes[LATE].driver.round.phase.value == "joining", look_s=0.1)
            await w.until(lambda: w.nodes[0].driver.round.round >= at + 3, look_s=0.1)
            assert asyncio.get_running_loop().time() - began < 3.1 * ROUND_S, "nobody waited for it"
            await w.until(lambda: w.all_final(at + 1))
            assert set(steps_of(w, at)) == {0, 1, 2}
            assert steps_of(w, at + 1) == dict.fromkeys(range(4), STEPS)

    run_virtual(story())
