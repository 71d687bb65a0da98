"""Whole nodes of a guarded run whose owner is gone while it alone decides."""

import asyncio

import pytest

from atoll.p2p.transports.memory.virtual_time import run_virtual
from tests.node.virtual.test_virtual_audits import AuditedWorker
from tests.node.virtual.test_virtual_shown_work import ROUND_S, guarded

LEASE_S = 60.0


@pytest.mark.parametrize(("killed", "most_s"), [(False, 2 * ROUND_S), (True, LEASE_S + 3 * ROUND_S)])
def test_rounds_go_on_when_the_owner_that_decides_alone_is_gone(world, killed, most_s):
    async def story() -> None:
        now = asyncio.get_running_loop().time
        async with world(40, 3, worker=AuditedWorker, adjust=guarded(True), lease_s=LEASE_S) as w:
            for number in range(3):
                w.start(number, ROUND_S)
            await w.until(lambda: w.all_final(2))
            assert {*w.nodes[1].driver.finality.voters} == {w.spec.owner} == {w.nodes[0].peer}
            rest = [w.nodes[1].driver, w.nodes[2].driver]
            gone_s = now()
            await (w.kill(0) if killed else w.stop(0))
            final = max(driver.finality.last_final for driver in rest)
            await w.until(lambda: min(driver.finality.last_final for driver in rest) > final)
            print(f"final again after {now() - gone_s:.1f} s of {most_s:.0f}")
            assert now() - gone_s <= most_s
            assert w.spec.owner not in rest[0].finality.voters

    run_virtual(story())
