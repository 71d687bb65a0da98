"""Whole nodes whose rounds are reduced: one digest, whoever reduces, dies, is silent or lies."""

import asyncio
import random

import pytest

from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.errors import DiskFault
from atoll.protocols.ledger.records import Reduction
from atoll.protocols.run.slices import ReduceSpec

PRESETS_LEASE_S = 60.0
ROUND_S = 10.0
SPEC = ReduceSpec(above=1, gap=2, k=128, sample_256=0)
CAREFUL = ReduceSpec(above=1, gap=2, k=128, sample_256=1 << 16)
MORE_CRASHES = pytest.mark.slow(slice="test_one_digest_whoever_crashes_when")


def reduced_slices(node, number):
    return sum(bool(part.reduced) for part in node.worker.sliced.get(number, ()))


def all_rounds(w):
    """Rounds with the number of slices that were reduced in them, at node 0."""
    return [reduced_slices(w.nodes[0], number) for number in range(w.spec.outer.rounds)]


@pytest.mark.parametrize("overlap_steps", [0, 10])
def test_rounds_are_reduced_as_soon_as_a_final_set_names_the_reducers(world, overlap_steps):
    async def story() -> None:
        async with world(8, 4, reduce=SPEC, overlap_steps=overlap_steps) as w:
            for number in range(4):
                w.start(number)
            await w.until(w.all_final)
            w.check_agreement()
            await w.check_feeds()
            found = all_rounds(w)
            assert found[:2] == [0, 0], "no final set before"
            assert found[4:] == [4] * 4, found
            for node in w.nodes.values():
                assert node.worker.trained == list(range(8))
                assert [len(row.contributors) for row in node.driver.context.log.rows.values()] == [4] * 8

    run_virtual(story())


@pytest.mark.slow(slice="test_rounds_are_reduced_as_soon_as_a_final_set_names_the_reducers")
def test_eighteen_members_reduce_above_sixteen(world):
    """More members than slices: 18 members, 12 chunks. The bytes of 18 larger nodes: docs/log."""

    async def story() -> None:
        async with world(5, 18, reduce=ReduceSpec(gap=2)) as w:
            for number in range(18):
                w.start(number)
            await w.until(w.all_final)
            w.check_agreement()
            await w.check_feeds()
            assert all_rounds(w) == [0, 0, 12, 12, 12]
            for node in w.nodes.values():
                assert [len(row.contributors) for row in node.driver.context.log.rows.values()] == [18] * 5

    run_virtual(story())


def test_who_reduces_asks_members_that_it_is_not_connected_to(world):
    """Nobody but its author has the rows of a contribution: without a dial each round lasts a lease longer."""

    async def story() -> None:
        async with world(9, 6, reduce=SPEC, target=2) as w:
            for number in range(6):
                w.start(number)
            await w.until(lambda: w.newest() >= 3)
            assert 3 * 10.0 < await w.until(lambda: w.all_final(7)) < 5 * 13.0
            w.check_agreement()
            assert all_rounds(w)[3:8] == [6] * 5

    run_virtual(story())


def test_a_dead_reducer_costs_its_slice_until_the_final_set_tells(world):
    async def story() -> None:
        async with world(12, 5, reduce=SPEC) as w:
            for number in range(5):
                w.start(number)
            await w.until(lambda: w.newest() >= 5)
            await w.kill(3)
            await w.until(w.all_final)
            w.check_agreement()
            found = all_rounds(w)
            assert 4 in found[5:], "its slice alone was raw"
            assert found[-1] == 4, "then the others have all slices"

    run_virtual(story())


def test_a_reducer_that_lives_but_is_silent_is_waited_for_no_longer_than_patience(world):
    async def story() -> None:
        async with world(9, 4, reduce=SPEC) as w:
            for number in range(4):
                w.start(number)
            w.nodes[2].worker.mute = True
            await w.until(w.all_final)
            w.check_agreement()
            await w.check_feeds()
            assert 3 in all_rounds(w), "the other slices were reduced"
            assert all(len(row.contributors) == 4 for row in w.nodes[0].driver.context.log.rows.values())

    run_virtual(story())


@pytest.mark.parametrize("published", [False, True])
def test_a_reducer_that_is_killed_in_the_middle_of_a_round_and_comes_back(world, published):
    """Before it published, or before anybody got what it published: its slice is raw. Then it reduces again."""

    async def story() -> None:
        async with world(12, 4, reduce=SPEC, lease_s=PRESETS_LEASE_S) as w:
            for number in range(4):
                w.start(number)
            await w.until(lambda: w.newest() >= 4)
            node, at = w.nodes[3], 5
            node.worker.mute = not published
            sets = w.nodes[0].driver.reducer.ledger

            def mine() -> list[Reduction]:
                return [claim.body for claim in sets.claims.values() if claim.author == node.peer]

            def is_time() -> bool:
                said = any(body.round == at for body in mine())
                return said if published else at in node.driver.reducer._reducing

            await w.until(is_time, look_s=0.001)
            await w.kill(3)
            for body in mine():
                nobody = not any(other.swarm.blobs.store.has(body.payload) for other in list(w.nodes.values())[:3])
                assert nobody or body.round < at
            node.worker.mute = False
            node.worker.slices = None
            node.worker.renew_slices()
            took_s = await w.until(lambda: w.all_final(at))
            # The rest of the round, patience with the reducer and with what it alone has, the next round.
            assert took_s < 5 * ROUND_S, took_s
            w.start(3)
            await w.until(w.all_final)
            w.check_agreement()
            await w.check_feeds()
            found = all_rounds(w)
            assert found[at] == 3, found
            assert found[-1] == 4, found
            assert b"" in [body.previous for body in mine() if body.round > at], "it began with zeros"

    run_virtual(story())


WITHOUT_OVERLAP = pytest.param(
    0, marks=pytest.mark.slow(slice="test_a_lying_reducer_is_proven_wrong_and_its_slice_is_raw[10]")
)


@pytest.mark.parametrize("overlap_steps", [WITHOUT_OVERLAP, 10])
def test_a_lying_reducer_is_proven_wrong_and_its_slice_is_raw(world, overlap_steps):
    async def story() -> None:
        async with world(10, 4, reduce=CAREFUL, overlap_steps=overlap_steps) as w:
            for number in range(4):
                w.start(number)
            w.nodes[2].worker.lies = True
            await w.until(w.all_final)
            w.check_agreement()
            await w.check_feeds()
            for node in w.nodes.values():
                assert node.driver.reducer._doubts.bad, "everybody checked the proof"
                liars = {m.author for parts in node.worker.sliced.values() for p in parts for m in p.reduced}
                assert w.nodes[2].peer not in liars, "nothing of it is in a final set"
            assert 3 in all_rounds(w)

    run_virtual(story())


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=MORE_CRASHES) for seed in range(1, 6))])
def test_one_digest_whoever_crashes_when(world, seed):
    """Nodes and workers die at any time; one reducer lies; the net loses packets."""

    async def story() -> None:
        luck = random.Random(seed)
        async with world(12, 5, reduce=CAREFUL, overlap_steps=10 * (seed % 2)) as w:
            for number in range(5):
                w.start(number, train_s=8.0 + luck.uniform(0.0, 4.0))
            w.nodes[4].worker.lies = seed % 3 == 0
            for _ in range(3):
                await asyncio.sleep(luck.uniform(5.0, 25.0))
                victim = luck.randrange(5)
                await w.kill(victim)
                other = luck.choice([n for n in range(5) if n != victim])
                await w.nodes[other].crash_worker(luck.choice([0.0, 0.3, 3.0]))
                await asyncio.sleep(luck.uniform(0.0, 30.0))
                w.start(victim)
            await w.until(w.all_final)
            w.check_agreement()
            await w.check_feeds()
            assert any(all_rounds(w)), "something was reduced"

    run_virtual(story())


def test_a_newcomer_applies_reduced_rounds_or_a_snapshot(world):
    async def story() -> None:
        async with world(14, 4, reduce=SPEC) as w:
            for number in range(4):
                w.start(number)
            await w.until(lambda: w.newest() >= 7)
            late = w.start(7)
            await w.until(w.all_final)
            w.check_agreement()
            assert max(late.worker.trained) == 13
            assert late.peer in w.nodes[0].driver.context.log.rows[13].contributors

    run_virtual(story())


def test_a_reduction_that_the_disk_refused_is_published_a_moment_later(world):
    """As what it is: rows that came meanwhile are not in it, and to say that they are would be proven wrong."""
    refused = []

    async def story() -> None:
        async with world(8, 4, reduce=CAREFUL) as w:
            for number in range(4):
                w.start(number)
            sick = w.nodes[3]
            await w.until(lambda: sick.driver is not None)
            net, sources = sick.driver.net, sick.driver.reducer._rows
            publish, has_rows = net.publish, sources.has

            def full(body):
                if isinstance(body, Reduction) and not refused:
                    refused.append(body.round)
                    raise DiskFault("no space left")
                return publish(body)

            def late(offer, span):
                return has_rows(offer, span) and (bool(refused) or offer.author != w.nodes[0].peer)

            net.publish, sources.has = full, late
            await w.until(w.all_final)
            w.check_agreement()
            sets = w.nodes[0].driver.reducer.ledger
            found = [c for c in sets.claims.values() if (c.author, c.body.round) == (sick.peer, refused[0])]
            assert found, "it was published"
            assert len(sets.covered(found[0])) == 3
            for node in w.nodes.values():
                assert "reduction_wrong" not in (node.home / "events.jsonl").read_text()

    run_virtual(story())
