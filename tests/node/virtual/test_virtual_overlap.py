"""Whole nodes that train a round while the one before is sent, collected and folded, and that share out steps."""

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import pytest

from atoll.p2p.transports.memory.memory_network import Quality
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.local.control_messages import RoundStatus
from tests.node.virtual.conftest import HALF

Worlds = Callable[..., object]

ROUNDS, MORE = 10, 14
SOME, ALL = 5, 40
"""Steps of overlap, of 20 in a round."""
SLOW_FAULTS = pytest.mark.slow(slice="test_kills_pauses_and_a_partition_with_overlap")
SLOW_LOSSLESS = pytest.mark.slow(slice="test_overlap_hides_the_exchange")


@dataclass
class Ran:
    """What an undisturbed swarm did, one number per node."""

    took_s: float
    idle: list[float]
    trained: list[int]
    included: list[int]
    """Rounds whose final set holds the node's contribution."""

    @property
    def mean_idle(self) -> float:
        return sum(self.idle) / len(self.idle)


def ran(world: Worlds, speeds_s: Sequence[float], rounds: int = ROUNDS, **more: float) -> Ran:
    """All rounds of nodes that need so many seconds each for a round's nominal steps."""
    found: list[Ran] = []

    async def story() -> None:
        async with world(rounds, len(speeds_s), **more) as w:
            for number, train_s in enumerate(speeds_s):
                w.start(number, train_s=train_s)
            took_s = await w.until(w.all_final)
            w.check_agreement()
            await w.check_feeds()
            nodes, rows = list(w.nodes.values()), w.nodes[0].driver.context.log.rows
            idle = [1.0 - node.worker.busy_s / took_s for node in nodes]
            included = [sum(node.peer in row.contributors for row in rows.values()) for node in nodes]
            found.append(Ran(took_s, idle, [len(node.worker.trained) for node in nodes], included))

    run_virtual(story())
    return found[0]


@pytest.mark.parametrize("loss", [pytest.param(0.0, marks=SLOW_LOSSLESS), 0.02])
@pytest.mark.usefixtures("asked_for")
def test_overlap_hides_the_exchange(world, loss):
    blocking, some, every = (
        ran(world, [10.0] * 4, latency_s=0.3, loss=loss, overlap_steps=steps) for steps in (0, SOME, ALL)
    )
    for overlapped in (some, every):
        assert overlapped.mean_idle < 0.6 * blocking.mean_idle
        assert overlapped.took_s < blocking.took_s
        assert overlapped.included == [ROUNDS] * 4, "nothing comes too late"
        assert overlapped.trained == [ROUNDS] * 4


@pytest.mark.slow(slice="test_overlap_hides_the_exchange")
def test_overlap_hides_what_varies_between_members(world):
    """Members of different speeds: each waits for the slowest, but for nothing else."""
    # So many rounds that the start, which takes 20 to 36 s by chance, is a small part of the time.
    rounds = 2 * MORE
    blocking, overlapped = (
        ran(world, [10.0, 10.0, 12.0, 15.0], rounds, latency_s=1.0, overlap_steps=steps) for steps in (0, ALL)
    )
    assert overlapped.mean_idle < blocking.mean_idle
    assert overlapped.idle[3] < 0.12, "the slowest waits for nobody but at the start and the end"
    assert overlapped.included == [rounds] * 4


def test_members_four_times_slower_do_not_hold_up_the_others(world):
    """Half of three are two: the slowest is waited for by nobody, as three quarters would.

    It has work in no final set while it begins each round too late, so it is on trial. In rounds of its trial it
    is waited for, as long as its lease says; the others close without it.
    """
    speeds_s = [10.0, 20.0, 40.0]
    blocking, some, every = (ran(world, speeds_s, overlap_steps=steps, **HALF) for steps in (0, SOME, ALL))
    assert blocking.took_s < (0.75 * ROUNDS + blocking.included[2]) * speeds_s[-1]
    for overlapped in (some, every):
        # The slowest member's rounds are the last to end; what counts is what all do until then.
        assert sum(overlapped.included) / overlapped.took_s > sum(blocking.included) / blocking.took_s
        assert overlapped.included[2] >= 3, "with overlap it goes where the others will be"
    assert every.mean_idle < blocking.mean_idle


@pytest.mark.parametrize("overlap_steps", [SOME, pytest.param(ALL, marks=SLOW_FAULTS)])
def test_kills_pauses_and_a_partition_with_overlap(world, overlap_steps):
    async def story() -> None:
        async with world(24, 6, overlap_steps=overlap_steps, latency_s=0.1, loss=0.01) as w:
            for number in range(6):
                w.start(number, train_s=8.0 + 2.0 * (number % 3))
            await w.until(lambda: w.newest() >= 3)
            w.nodes[1].driver.pause("by the user")
            await w.kill(2)
            await w.until(lambda: w.newest() >= 7)
            w.nodes[1].driver.resume()
            w.start(2)
            await w.until(lambda: w.newest() >= 10)
            peers = [node.peer for node in w.nodes.values()]
            w.network.cut(peers[:2], peers[2:])
            await asyncio.sleep(45.0)
            w.network.heal()
            await w.until(w.all_final)
            w.check_agreement()
            await w.check_feeds()
            rows = w.nodes[0].driver.context.log.rows
            assert len(rows) == 24
            sizes = [len(rows[number].contributors) for number in range(24)]
            assert sizes[:2] + sizes[-2:] == [6] * 4, f"all are in step again: {sizes}"
            for node in w.nodes.values():
                assert len(node.worker.trained) == len(set(node.worker.trained)), "no round is trained twice"
            assert all(len(w.nodes[number].worker.trained) >= 22 for number in (3, 4, 5)), "and few are skipped"

    run_virtual(story())


MORE = pytest.mark.slow(slice="test_a_worker_may_die_at_any_point_with_a_round_in_flight")


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=MORE) for seed in (2, 3))])
def test_a_worker_may_die_at_any_point_with_a_round_in_flight(world, seed):
    async def story() -> None:
        luck = random.Random(seed)
        async with world(10, 3, overlap_steps=(SOME, ALL)[seed % 2]) as w:
            for number in range(3):
                w.start(number)
            await asyncio.sleep(1.0)
            for _ in range(12):
                await asyncio.sleep(luck.uniform(0.0, 14.0))
                await w.nodes[luck.randrange(3)].crash_worker(luck.choice([0.0, 0.3, 3.0]))
            await w.until(w.all_final)
            w.check_agreement()
            await w.check_feeds()
            for node in w.nodes.values():
                assert len(node.worker.trained) == len(set(node.worker.trained)), "no round is trained twice"
                assert len(node.worker.trained) >= 5

    run_virtual(story())


@pytest.mark.parametrize("overlap_steps", [0, SOME])
def test_a_slow_member_takes_fewer_steps_and_is_in_time(world, overlap_steps):
    """Three times slower than the others: with its share of the steps it holds nobody up, and misses nothing."""
    speeds_s = [10.0, 10.0, 10.0, 30.0]
    # Rounds that wait for others for a round time: so they show what the slow one's fewer steps save. Of whole
    # rounds it has work in no final set, and after three of its own nobody waits for it any more.
    whole = ran(world, speeds_s, overlap_steps=overlap_steps, **HALF)
    shared = ran(world, speeds_s, overlap_steps=overlap_steps, **HALF, least_256=64)
    assert shared.took_s < 0.9 * whole.took_s
    assert whole.included[3] == 0
    assert shared.included[3] >= ROUNDS - 2
    assert shared.included[:3] == [ROUNDS] * 3


def test_a_fast_member_takes_more_steps_while_the_others_finish(world):
    speeds_s = [5.0, 10.0, 10.0, 10.0]
    plain, more = (ran(world, speeds_s, most_256=most_256) for most_256 in (256, 512))
    assert more.idle[0] < plain.idle[0] - 0.25
    assert more.took_s < 1.05 * plain.took_s
    assert more.included == [ROUNDS] * 4


def test_a_node_whose_link_is_slow_runs_further_ahead_and_waits_for_no_fold(world):
    """Packets to node 3 take a second longer, two of its steps: it gets all payloads late, nobody else does."""
    seen: dict[int, list[RoundStatus]] = {}
    bounds = lambda spec: msgspec.structs.replace(  # noqa: E731
        spec, outer=msgspec.structs.replace(spec.outer, overlap_steps=2, overlap_most=15)
    )

    async def story() -> None:
        async with world(16, 4, adjust=bounds) as w:
            peers = [w.start(number).peer for number in range(4)]
            for peer in peers[:3]:
                w.network.direction(peer, peers[3]).quality = Quality(1.0, math.inf, 0.0)
            await w.until(w.all_final)
            w.check_agreement()
            for number, node in w.nodes.items():
                seen[number] = [row for _, row in sorted(node.driver.context.log.rows.items())]

    run_virtual(story())
    late = {number: rows[8:] for number, rows in seen.items()}
    fast = max(row.overlap_allowed for number in range(3) for row in late[number])
    assert fast <= 5, "a request to node 3 is slow too, its answer is not"
    assert all(fast < row.overlap_allowed < 15 for row in late[3]), [row.overlap_allowed for row in seen[3]]
    assert all(row.overlapped > fast for row in late[3]), "it would have waited"
    assert sum(row.held_s for rows in late.values() for row in rows) == 0.0
    for rows in late.values():
        allowed = [row.overlap_allowed for row in rows]
        assert sum(a != b for a, b in pairwise(allowed)) <= 2, allowed
    assert all(len(row.contributors) == 4 for row in late[0]), "and it is in time for the others"


@pytest.mark.usefixtures("asked_for")
def test_without_more_room_the_same_node_waits(world):
    """What the test above is about: two steps are too few for its link. Only node 3 is behind it."""
    held: list[float] = []

    async def story() -> None:
        async with world(10, 4, overlap_steps=2) as w:
            peers = [w.start(number).peer for number in range(4)]
            for peer in peers[:3]:
                w.network.direction(peer, peers[3]).quality = Quality(1.0, math.inf, 0.0)
            await w.until(w.all_final)
            held.extend(row.held_s for row in w.nodes[3].driver.context.log.rows.values() if row.round >= 4)

    run_virtual(story())
    assert sum(held) / len(held) > 1.0
