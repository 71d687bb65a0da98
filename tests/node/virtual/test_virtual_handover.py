"""Whole nodes with real workers: moments of experts go from those who give them up to those who take them."""

import asyncio
from functools import partial

import msgspec
import torch

from atoll.p2p.blobs.store import BlobStore
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.ledger.coverage import largest_payload
from atoll.protocols.ledger.records import Contribution
from atoll.protocols.run.experts import experts_in
from atoll.protocols.run.moments import moments_bytes, places_of
from atoll.protocols.run.run_spec import Stage
from tests.node.virtual.conftest import EXPERTS
from tests.node.virtual.real_worker import RealWorker, Seen

STEPS = 4


def small(spec):
    data = msgspec.structs.replace(spec.data, source="synthetic:markov?size=65536")
    return msgspec.structs.replace(
        spec, data=data, outer=msgspec.structs.replace(spec.outer, stages=(Stage(0, STEPS),))
    )


def age(world, node, expert):
    """Steps that the moments of an expert have behind them."""
    name = places_of(world.spec.model, expert)[0].name
    return int(node.worker.session._learner.inner.state()[f"step/{name}"])


def steps_here(node, expert):
    """Steps that the node trained it, without a break, until now."""
    owned = [expert in experts_in(bitmap, EXPERTS) for _, bitmap in sorted(node.worker.owned.items())]
    return STEPS * (owned[::-1].index(False) if False in owned else len(owned))


def ours(node):
    return experts_in(node.worker.owned[max(node.worker.owned)], EXPERTS)


def test_who_comes_late_goes_on_with_the_moments_of_who_was_there(world):
    torch.set_num_threads(1)

    async def story() -> None:
        worker = partial(RealWorker, seen=Seen({}, {}, {}, {}))
        async with world(14, 2, worker=worker, adjust=small, holders=1) as w:
            w.start(0)
            w.start(1)
            await w.until(lambda: w.newest() >= 5)
            late = w.start(2)
            await w.until(w.all_final)
            w.check_agreement()
            assert ours(late)
            ages = {expert: age(w, late, expert) - steps_here(late, expert) for expert in ours(late)}
            assert all(4 * STEPS <= older <= 8 * STEPS for older in ages.values()), ages
            for node in w.nodes.values():  # offers end, and no blob of them stays behind
                assert not node.driver.assignment.offered_moments
                assert not node.driver.moments._fetched
                bodies = [entry.body for _, entry in node.swarm.ledger.since(0, 1 << 20)]
                payloads = {body.payload for body in bodies if isinstance(body, Contribution)}
                assert set(node.swarm.blobs.store.blobs()) <= payloads | node.driver.finalizer.snapshots

    run_virtual(story())


def test_who_lies_about_moments_stops_nobody(world):
    """Node 1 offers junk, and blobs of the run itself, as moments of every expert."""
    torch.set_num_threads(1)

    async def story() -> None:
        worker = partial(RealWorker, seen=Seen({}, {}, {}, {}))
        async with world(10, 2, worker=worker, adjust=small, holders=1) as w:
            w.start(0)
            liar = w.start(1)
            await w.until(lambda: w.newest() >= 3)
            junk = w.root / "junk"
            junk.write_bytes(b"\xff" * 1000)
            blobs = [liar.swarm.blobs.store.add_file(junk), *sorted(liar.swarm.blobs.store.blobs())[:3]]
            lies = tuple((expert, bytes(blobs[expert % len(blobs)])) for expert in range(EXPERTS))
            liar.driver.moments._publish = lambda: None
            liar.driver.assignment.offered_moments = lies
            liar.driver.assignment.publish()
            late = w.start(2)
            await w.until(w.all_final)
            w.check_agreement()
            assert max(late.worker.trained) == 9
            assert not late.driver.moments._busy
            assert all(w.nodes[n].driver.assignment.offered_moments == () for n in (0, 2))

    run_virtual(story())


def test_what_an_earlier_life_offered_is_deleted_at_the_start(world):
    async def story() -> None:
        async with world(4, 1, holders=1, vocab=3 << 14) as w:
            assert moments_bytes(w.spec.model, w.spec.inner.optimizer) < largest_payload(w.spec), (
                "what is larger is taken for a snapshot"
            )
            node = w.start(0)
            await w.until(lambda: node.worker.final >= 0)
            await w.kill(0)
            store = BlobStore(node.home / "blobs")
            size = moments_bytes(w.spec.model, w.spec.inner.optimizer)
            old, other = store.add_bytes(bytes(size)), store.add_bytes(bytes(size - 1))
            before = store.blobs()
            w.start(0)
            await asyncio.sleep(1.0)
            assert not node.swarm.blobs.store.has(old)
            assert before - {old} <= node.swarm.blobs.store.blobs()
            assert other in before

    run_virtual(story())
