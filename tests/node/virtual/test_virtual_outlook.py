"""What a preview says of a run, against the run itself: whole nodes on virtual time."""

import asyncio
from statistics import median

import pytest

from atoll.node.daemon.telemetry.run_outlook import outlook_of
from atoll.node.runs.capacity.reduced_traffic import reduced_traffic
from atoll.node.runs.capacity.round_traffic import payload_traffic, round_bytes
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.ledger.registers import Lease
from atoll.protocols.run.slices import ReduceSpec

ROUND_S, ROUNDS, SHARE = 10.0, 30, 0.1
"""Each figure of a preview is within this share of the truth."""
COUNTED = 0.25
"""So is what it says of records and leases, which are a small part of the bytes, within this one."""


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


def moved(world, members, rounds, train_s, **more):
    """The RunSpec, bytes that a node sent and received in a round, and seconds of a round: means of all nodes.

    The payload is as large as that of the preset `tiny`, where records weigh most.
    """

    async def story():
        async with world(4000, members, vocab=16384, **more) as w:
            for number in range(members):
                w.start(number, train_s=train_s)
            await w.until(lambda: w.newest() >= 5)
            first, began_s = w.newest(), asyncio.get_running_loop().time()
            await w.until(lambda: w.newest() >= first + rounds + 2)
            round_s = (asyncio.get_running_loop().time() - began_s) / (w.newest() - first)
            logs = [node.driver.context.log for node in w.nodes.values()]
            rows = [log.rows[number] for log in logs for number in range(first, first + rounds)]
            up, down = (sum(getattr(row, name) for row in rows) / len(rows) for name in ("bytes_up", "bytes_down"))
            return w.spec, up, down, round_s

    return run_virtual(story())


MORE = pytest.mark.slow(slice="test_the_bytes_of_a_round_are_those_that_a_node_sends_and_receives")


@pytest.mark.parametrize(
    ("members", "train_s", "lease_s", "name"),
    [
        (2, 2.0, 20.0, ""),
        (3, 10.0, 60.0, ""),
        (2, 60.0, 20.0, "x" * 32),
        pytest.param(4, 60.0, 20.0, "", marks=MORE),
        pytest.param(4, 60.0, 20.0, "x" * 32, marks=MORE),
        pytest.param(6, 5.0, 20.0, "", marks=MORE),
    ],
)
def test_the_bytes_of_a_round_are_those_that_a_node_sends_and_receives(world, members, train_s, lease_s, name):
    """Names are no part of what is said."""
    spec, up, down, round_s = moved(world, members, 10, train_s, lease_s=lease_s, name=name)
    said, payloads = round_bytes(spec, members, round_s), payload_traffic(spec, members)
    print(
        f"{members} members, {round_s:.2f} s: said {said}, sent {up:.0f}, received {down:.0f}, {payloads} payload"
    )
    assert said == pytest.approx(up, rel=SHARE)
    assert said == pytest.approx(down, rel=SHARE)
    assert said - payloads == pytest.approx(up - payloads, rel=COUNTED)


SLOW = pytest.mark.slow(slice="test_the_bytes_of_a_reduced_round_are_those_that_a_node_sends_and_receives")


@pytest.mark.parametrize(
    ("members", "sample_256", "rounds"),
    [
        (4, 85, 6),
        pytest.param(6, 0, 6, marks=SLOW),
        pytest.param(6, 213, 10, marks=SLOW),
        pytest.param(12, 48, 16, marks=SLOW),
    ],
)
def test_the_bytes_of_a_reduced_round_are_those_that_a_node_sends_and_receives(world, members, sample_256, rounds):
    """Openings are most of it, and are drawn. With 85 of 4 members, and 213 of 6, each opens one of each slice."""
    reduce = ReduceSpec(above=2, gap=2, sample_256=sample_256)
    spec, up, down, round_s = moved(world, members, rounds, ROUND_S, lease_s=20.0, reduce=reduce)
    said, no_records = round_bytes(spec, members, round_s), reduced_traffic(spec, members)
    print(f"{members} members: said {said}, sent {up:.0f}, received {down:.0f}, {no_records:.0f} are no records")
    assert said == pytest.approx(up, rel=SHARE)
    assert said == pytest.approx(down, rel=SHARE)
