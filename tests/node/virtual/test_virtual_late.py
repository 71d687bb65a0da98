"""Whole nodes: who comes up in the middle of a round is done with the others, or begins with their next one."""

import asyncio

import pytest

from atoll.node.daemon.assets import first_records
from atoll.node.daemon.coordinator.payload_fetcher import PayloadFetcher
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


@pytest.mark.usefixtures("asked_for")
@pytest.mark.parametrize("waits_s", [0.0, first_records.LIMIT_S])
def test_a_newcomer_fetches_payloads_of_few_rounds_though_it_took_an_empty_ledger_for_whole(
    world, monkeypatch, waits_s
):
    """Its first neighbour was as new as it: until the members' records have come it waits, or fetches little."""
    monkeypatch.setattr(first_records, "LIMIT_S", waits_s)
    loaded, real = [], PayloadFetcher._load

    async def load(self, record, author, attempt):
        if self is w.nodes[LATE].driver.sets.payloads:
            loaded.append(record.round)
        return await real(self, record, author, attempt)

    async def story():
        nonlocal w
        async with world(4000, 3, **PACE, latency_s=0.3) as w:
            for number in range(3):
                w.start(number)
            await w.until(lambda: w.all_final(30))
            newcomer = w.start(LATE)
            monkeypatch.setattr(PayloadFetcher, "_load", load)
            await w.until(lambda: newcomer.swarm is not None, look_s=0.01)
            newcomer.swarm.replication.anti_entropy.synced.set()
            await w.until(lambda: newcomer.worker.final > 30)
            assert set(loaded) <= {*[0] * (not waits_s), *range(30, 40)}

    w = None
    run_virtual(story())
