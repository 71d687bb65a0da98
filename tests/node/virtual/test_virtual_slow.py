"""Whole nodes, one of which is many times slower than the others: it does what fits into their rounds."""

import asyncio

import msgspec
import pytest

from atoll.node.runs.presets import preset
from atoll.node.worker.round_trainer import weight_of
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.ledger.records import Contribution
from tests.node.virtual.conftest import CONTEXT, STEPS, FakeWorker

PACE = {"lease_s": 60.0, "quorum_256": 192, "grace_256": 128, "least_256": 64}
"""The presets'."""
FAST, ROUND_S, SLOWER, BATCH = 3, 10.0, 30, 16
ROUNDS = 50
"""After the slow member has joined."""
NOMINAL = STEPS * BATCH * CONTEXT


def large_steps(spec):
    """Steps of which sequences may be left out."""
    return msgspec.structs.replace(spec, inner=msgspec.structs.replace(spec.inner, batch=BATCH))


def ran(world, speeds_s, adjust=large_steps, **more):
    """Seconds of ROUNDS rounds after all nodes were up; which of them hold the last node's work; its weights."""

    async def story():
        async with world(4000, FAST, adjust=adjust, **PACE, **more) as w:
            for number, train_s in enumerate(speeds_s[:FAST]):
                w.start(number, train_s=train_s)
            await w.until(lambda: w.all_final(w.spec.outer.stages[-1].first + 2))
            for number, train_s in enumerate(speeds_s[FAST:], FAST):
                w.start(number, train_s=train_s)
            loop, first = asyncio.get_running_loop(), w.newest()
            began_s = loop.time()
            await w.until(lambda: w.newest() >= first + ROUNDS)
            took_s = loop.time() - began_s
            await w.until(lambda: w.all_final(first + ROUNDS))
            w.check_agreement()
            await w.check_feeds()
            last = w.nodes[len(speeds_s) - 1].peer
            rows = w.nodes[0].driver.context.log.rows.values()
            counted = range(first + 1, first + ROUNDS + 1)
            holding = [row.round for row in rows if last in row.contributors and row.round in counted]
            said = {}
            for _, entry in w.nodes[0].swarm.ledger.since(0, 1 << 20):
                if isinstance(entry.body, Contribution) and entry.author == last:
                    said[entry.body.round] = entry.body
            return took_s, holding, said

    return run_virtual(story())


SLOW = pytest.mark.slow(slice="test_a_member_thirty_times_slower_is_in_the_final_sets_and_holds_nobody_up")


@pytest.mark.parametrize("overlap_steps", [0, pytest.param(5, marks=SLOW)])
def test_a_member_thirty_times_slower_is_in_the_final_sets_and_holds_nobody_up(world, overlap_steps, capsys):
    alone_s, _, _ = ran(world, [ROUND_S] * FAST, overlap_steps=overlap_steps)
    took_s, holding, said = ran(world, [ROUND_S] * FAST + [ROUND_S * SLOWER], overlap_steps=overlap_steps)
    assert took_s == pytest.approx(alone_s, rel=0.05)
    assert len(holding) >= 0.9 * ROUNDS
    for number in holding:
        body = said[number]
        assert body.weight == weight_of(body.tokens, NOMINAL), "and its weight is what it trained on"
        assert body.tokens < NOMINAL / 20
    with capsys.disabled():
        share = f"{len(holding)} of {ROUNDS} final sets, rounds {took_s / alone_s:.3f} times as long"
        print(f"\n{SLOWER} times slower, overlap {overlap_steps}: {share}")


FIXED = {"tiny": 0.29, "moe-smoke": 0.14}
"""Share of a whole step's time that does not depend on its sequences, measured: `docs/steps.md`."""


@SLOW
@pytest.mark.parametrize(("name", "slower"), [("moe-smoke", SLOWER), ("tiny", 15)])
def test_with_the_small_presets_own_numbers(world, name, slower, capsys):
    """Batch, stages, overlap and pace of the preset, and what its steps cost without sequences."""

    def as_preset(spec):
        own = preset(name, spec.owner, 1)
        outer = msgspec.structs.replace(spec.outer, stages=own.outer.stages, overlap_steps=own.outer.overlap_steps)
        inner = msgspec.structs.replace(spec.inner, batch=own.inner.batch)
        return msgspec.structs.replace(spec, inner=inner, outer=outer, pace=own.pace)

    class Worker(FakeWorker):
        def __init__(self, folder, me, train_s, spec):
            # Nominal rounds of eight steps take ROUND_S.
            super().__init__(folder, me, train_s * STEPS / spec.outer.stages[-1].steps, spec)
            self.fixed = FIXED[name]

    alone_s, _, _ = ran(world, [ROUND_S] * FAST, as_preset, worker=Worker)
    took_s, holding, _ = ran(world, [ROUND_S] * FAST + [ROUND_S * slower], as_preset, worker=Worker)
    with capsys.disabled():
        share = f"{len(holding)} of {ROUNDS} final sets, rounds {took_s / alone_s:.3f} times as long"
        print(f"\n{name}, {slower} times slower: {share}")
    assert took_s == pytest.approx(alone_s, rel=0.05)
    assert len(holding) >= 0.9 * ROUNDS


def test_a_newcomer_five_times_slower_than_the_only_member_is_in_final_sets(world):
    """What it trains is late for a round that waits one round time for it, and then announced to nobody."""
    rounds = 15

    async def story():
        async with world(4000, 1, **PACE) as w:
            w.start(0, train_s=ROUND_S)
            await w.until(lambda: w.all_final(3))
            w.start(1, train_s=5 * ROUND_S)
            first = w.newest()
            await w.until(lambda: w.all_final(first + rounds))
            w.check_agreement()
            rows = w.nodes[0].driver.context.log.rows.values()
            return [row.round for row in rows if w.nodes[1].peer in row.contributors and row.round > first]

    assert len(run_virtual(story())) >= rounds // 2
