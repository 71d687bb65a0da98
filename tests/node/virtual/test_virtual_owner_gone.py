"""Whole nodes of a guarded run whose owner is gone while it alone decides."""

import asyncio

import pytest

from atoll.p2p.transports.memory.virtual_time import run_virtual
from tests.node.virtual.test_virtual_audits import AuditedWorker
from tests.node.virtual.test_virtual_shown_work import ROUND_S, guarded

LEASE_S = 60.0


@pytest.mark.parametrize(
    ("killed", "members", "lease_s", "most_s"),
    [
        (False, 3, LEASE_S, 3 * ROUND_S),
        (True, 3, LEASE_S, LEASE_S + 3 * ROUND_S),
        (False, 5, LEASE_S, 3 * ROUND_S),
        (True, 4, ROUND_S / 2, 4 * ROUND_S),
    ],
)
def test_rounds_go_on_in_one_chain_when_the_owner_that_decides_alone_is_gone(
    world, killed, members, lease_s, most_s
):
    """All end their round at one time: who knew its own work alone and went on at once would be apart for good."""

    async def story() -> None:
        now = asyncio.get_running_loop().time
        async with world(40, members, worker=AuditedWorker, adjust=guarded(True), lease_s=lease_s) as w:
            for number in range(members):
                w.start(number, ROUND_S)
            await w.until(lambda: w.all_final(2))
            assert {*w.nodes[1].driver.finality.voters} == {w.spec.owner} == {w.nodes[0].peer}
            rest = [w.nodes[number].driver for number in range(1, members)]
            gone_s = now()
            await (w.kill(0) if killed else w.stop(0))
            final = max(driver.finality.last_final for driver in rest)
            await w.until(lambda: min(driver.finality.last_final for driver in rest) > final)
            print(f"final again after {now() - gone_s:.1f} s of {most_s:.0f}")
            assert now() - gone_s <= most_s
            assert w.spec.owner not in rest[0].finality.voters
            await w.until(lambda: w.all_final(final + 4))
            assert {driver.finality.epoch for driver in rest} == {rest[0].finality.epoch}
            assert {*rest[0].finality.voters} == {w.nodes[number].peer for number in range(1, members)}
            w.start(0)
            await w.until(lambda: w.all_final(final + 8))
            w.check_agreement()

    run_virtual(story())
