"""What a preview says of a run, against the run itself: whole nodes on virtual time."""

import asyncio
from statistics import median

import pytest

from atoll.node.daemon.telemetry.run_outlook import outlook_of
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.ledger.registers import Lease

ROUND_S, ROUNDS, SHARE = 10.0, 30, 0.1
"""Each figure of a preview is within this share of the truth."""


def test_round_members_loss_and_pace_are_those_of_the_run(world):
    async def story():
        async with world(4000, 4) as w:
            for number in range(4):
                w.start(number, train_s=ROUND_S)
            now = asyncio.get_running_loop().time
            await w.until(lambda: w.all_final(3))
            first, began_s = w.newest(), now()
            await w.until(lambda: w.newest() >= first + ROUNDS)
            pace_s = (now() - began_s) / (w.newest() - first)
            drivers = [node.driver for node in w.nodes.values()]
            trained = [driver.context.log.rows.newest("trained") for driver in drivers]
            leases = w.nodes[0].swarm.registers.live(Lease, now())
            return outlook_of(w.spec, leases), pace_s, trained, w.newest()

    seen, pace_s, trained, newest = run_virtual(story())
    assert seen.members == 4
    assert seen.final + 1 == pytest.approx(newest + 1, rel=SHARE), "a lease is as old as the round in training"
    assert seen.round == pytest.approx(median(row.round for row in trained), rel=SHARE)
    assert seen.loss == pytest.approx(median(row.train_loss for row in trained), rel=SHARE)
    assert seen.pace_s == pytest.approx(pace_s, rel=SHARE)
