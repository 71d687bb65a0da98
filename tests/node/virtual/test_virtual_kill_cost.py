"""Whole nodes in rounds of a second: what one kill, and the return after it, cost those that train on."""

import asyncio

import pytest

from atoll.p2p.transports.memory.virtual_time import run_virtual
from tests.node.virtual.test_virtual_goodput import PACE

NODES, VICTIM = 4, 1
ROUND_S = 0.9
OVERLAPPED = {**PACE, "least_256": 32, "overlap_steps": 10}
"""`tiny`'s: a round's half may be ahead of the fold, and an eighth of its steps is enough."""
DOWN_S = 3.0
"""From SIGKILL until the next worker is there, on 16 cores."""
COSTS_S = 0.3
"""A grace is 0.45 s. Rounds that wait for it at the kill, and again at the return, cost 0.45 to 0.7 s."""


class Watch:
    """When the watched node began each round."""

    def __init__(self, driver):
        self.driver, self.began = driver, {}

    async def look(self, until):
        while self.driver.round.round <= until:
            self.began.setdefault(self.driver.round.round, asyncio.get_running_loop().time())
            await asyncio.sleep(0.01)
        self.began.setdefault(self.driver.round.round, asyncio.get_running_loop().time())


async def delay_s(w, phase):
    """How much later the others begin the eighth round after a kill at this share of a round."""
    for number in range(NODES):
        w.start(number, ROUND_S * (1 + 0.01 * number))
    await w.until(lambda: w.all_final(5), limit_s=60.0, look_s=0.1)
    watch, at = Watch(w.nodes[0].driver), w.newest() + 6
    await watch.look(at - 1)
    await asyncio.sleep(phase * ROUND_S)
    await w.kill(VICTIM)
    async with asyncio.TaskGroup() as group:
        group.create_task(watch.look(at + 8))
        await asyncio.sleep(DOWN_S)
        w.start(VICTIM)
    await w.until(lambda: w.all_final(at + 8), limit_s=60.0, look_s=0.1)
    w.check_agreement()
    final = {row.round: row.contributors for row in w.nodes[0].driver.context.log.rows.values() if row.final}
    missed = [number for number in range(at, at + 9) if w.nodes[VICTIM].peer not in final[number]]
    assert len(missed) <= 3, "it takes part in the round in which it comes up"
    usual_s = (watch.began[at] - watch.began[at - 4]) / 4
    return watch.began[at + 8] - watch.began[at] - 8 * usual_s


@pytest.mark.parametrize("phase", [0.5, 0.75])
def test_a_kill_and_the_return_hold_up_nobody(world, phase):
    async def story():
        async with world(4000, NODES, latency_s=0.002, **OVERLAPPED) as w:
            cost_s = await delay_s(w, phase)
            print(f"a kill at {phase} of a round: {cost_s:.2f} s")
            assert cost_s <= COSTS_S

    run_virtual(story())
