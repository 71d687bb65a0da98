"""Whole nodes: halves that decided apart meet while many rounds are open, and whose work is folded into these."""

import asyncio

import pytest

from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.local.worker_messages import CheckRequest
from tests.node.virtual.conftest import FakeWorker

ROUND_S = 2.0
START_S = 4.0


class SlowChecks(FakeWorker):
    """Rounds become final no faster than they are trained: what the lease left open stays a backlog."""

    async def _answer(self, ask):
        if isinstance(ask, CheckRequest):
            await asyncio.sleep(0.5 * ROUND_S)
        return await super()._answer(ask)


LEASE = "test_rounds_that_are_open_at_the_heal_hold_the_work_of_one_side[trained_in_the_lease]"
CASES = [
    pytest.param(False, id="trained_in_the_lease"),
    pytest.param(True, id="trained_in_the_epochs", marks=pytest.mark.slow(slice=LEASE)),
]


@pytest.mark.parametrize("long", CASES)
def test_rounds_that_are_open_at_the_heal_hold_the_work_of_one_side(world, long):
    """Presets' pace, but for checks. `long`: all that is open at the heal was trained after the epochs began."""

    async def story() -> None:
        async with world(400, 1, worker=SlowChecks) as w:
            nodes = [w.start(number, ROUND_S) for number in range(4)]
            await w.until(lambda: w.all_final(4))
            w.network.cut([n.peer for n in nodes[:2]], [n.peer for n in nodes[2:]])
            apart = w.newest() + 1
            await w.until(lambda: all(len(n.driver.finality.chain) > 1 for n in nodes))
            begun = w.newest()
            await w.until(lambda: not long or w.all_final(begun + 1))
            healed, opened = max(n.worker.final for n in nodes), min(n.driver.round.round for n in nodes)
            assert opened - healed >= 20
            w.network.heal()
            await w.until(lambda: w.all_final(opened + 6))
            w.check_agreement()
            assert len(w.changes) == 2
            stayed = next(n for n in nodes if n.number not in dict(w.changes))
            counts = {at: len(row.contributors) for at, row in stayed.driver.context.log.rows.items() if row.final}
            assert {counts[at] for at in range(max(apart, healed) + 1, opened)} == {2}
            assert counts[opened + 6] == 4, "then all work together"

    run_virtual(story())


class SlowStarts(FakeWorker):
    """It starts within seconds, as where the disk is slow or the model large."""

    async def start(self):
        await asyncio.sleep(START_S)
        return await super().start()


def test_a_node_that_leaves_its_chain_has_the_others_model_before_its_worker_has_started(world):
    async def story() -> None:
        async with world(400, 1, worker=SlowStarts) as w:
            nodes = [w.start(number, ROUND_S) for number in range(4)]
            await w.until(lambda: w.all_final(4))
            w.network.cut([n.peer for n in nodes[:2]], [n.peer for n in nodes[2:]])
            await w.until(lambda: all(len(n.driver.finality.chain) > 1 for n in nodes))
            begun = w.newest()
            await w.until(lambda: w.all_final(begun + 8))
            healed = max(n.worker.final for n in nodes)
            w.network.heal()
            await w.until(lambda: len(w.changes) == 2, look_s=0.1)
            leavers = [nodes[number] for number, _ in w.changes]
            await w.until(
                lambda: all(n.driver.finalizer.search.newest() for n in leavers), START_S / 2, look_s=0.1
            )
            assert not any(n.driver.worker.is_ready for n in leavers)
            await w.until(lambda: w.all_final(healed + 1), START_S, look_s=0.1)
            w.check_agreement()

    run_virtual(story())


def test_who_comes_back_late_by_a_round_is_in_step_soon(world):
    """Three alone, two of them meet, then all: the third comes when the others are at the end of their round.

    Without overlap it trained each round anew just after the others had left it, and its work never counted.
    """

    async def story() -> None:
        async with world(4000, 1, lease_s=60.0, quorum_256=192, grace_256=128) as w:
            peers = [w.start(number, 10.0).peer for number in range(3)]
            await asyncio.sleep(45.0)
            w.network.cut([peers[0]], [peers[1]])
            w.network.cut([peers[0], peers[1]], [peers[2]])
            await asyncio.sleep(68.0)
            w.network.heal()
            w.network.cut([peers[0], peers[1]], [peers[2]])
            await asyncio.sleep(36.0)
            w.network.heal()
            await asyncio.sleep(50.0)
            first = w.newest() + 1
            await w.until(lambda: w.all_final(first + 6))
            rows = w.nodes[0].driver.context.log.rows
            counts = [len(row.contributors) for at, row in rows.items() if row.final and first <= at <= first + 5]
            assert counts == [3] * 6
            w.check_agreement()

    run_virtual(story())
