"""What a member sends when rounds are reduced and when they are not: eighteen whole nodes on virtual time."""

import asyncio

import pytest

from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.ledger.coverage import payload_size
from atoll.protocols.run.slices import ReduceSpec
from tests.node.virtual.traffic_meter import Meter

MEMBERS, ROUNDS, SETTLED = 18, 7, range(3, 6)


def measured(world, meter: Meter, reduce: ReduceSpec | None) -> tuple[float, float]:
    """Bytes that a node sends in a round, and virtual seconds of a round; rounds overlap, as in the presets."""
    found: list[float] = []

    async def story() -> None:
        async with world(ROUNDS, MEMBERS, reduce=reduce, vocab=16384, overlap_steps=5) as w:
            for number in range(MEMBERS):
                w.start(number)
            await w.until(lambda: w.newest() >= SETTLED.start)
            meter.clear()
            began = asyncio.get_running_loop().time()
            await w.until(lambda: w.newest() >= SETTLED.stop)
            seconds = asyncio.get_running_loop().time() - began
            sent_by_kind = {name: round(size / len(SETTLED)) for name, size in meter.split().items()}
            await w.until(w.all_final)
            w.check_agreement()
            await w.check_feeds()
            rows = [node.driver.context.log.rows[number] for node in w.nodes.values() for number in SETTLED]
            assert all(len(row.contributors) == MEMBERS for row in rows)
            found.extend((sum(row.bytes_up for row in rows) / len(rows), seconds / len(SETTLED)))
            sliced = [part for number in SETTLED for part in w.nodes[0].worker.sliced.get(number, ())]
            assert [bool(part.reduced) for part in sliced] == [True] * (MEMBERS * len(SETTLED) if reduce else 0)
            print(f"payload {payload_size(w.spec, 0)} B, reduced {reduce is not None}: {found}")
            print(f"bytes that a node sends in a round: {sent_by_kind}")

    run_virtual(story())
    sent, seconds = found
    return sent, seconds


@pytest.mark.measure
@pytest.mark.timeout(1200)
def test_a_member_of_eighteen_sends_less_in_a_reduced_round_that_lasts_as_long(world, monkeypatch):
    meter = Meter(monkeypatch, MEMBERS)
    gathered, gathered_s = measured(world, meter, None)
    reduced, reduced_s = measured(world, meter, ReduceSpec(gap=2))
    assert reduced < 0.75 * gathered
    assert reduced_s < 1.15 * gathered_s
