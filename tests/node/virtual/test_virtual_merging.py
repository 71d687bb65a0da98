"""Whole nodes with real workers; the experts of their mixture are merged: one model, through death and return."""

from functools import partial

import msgspec
import pytest
import torch

from atoll.node.learning.model.merging import merge_after_round
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.run.run_spec import Stage
from atoll.protocols.run.sections.merging import MergeSpec
from tests.node.virtual.real_worker import RealWorker, Seen, both_before_and_after

ROUNDS = 14
SLOW = pytest.mark.slow(slice=("test_four_nodes_merge_alike_while_one_is_killed_and_comes_back"))


def merging(spec, fragments):
    merge = MergeSpec(every=2, until=40, alpha_4096=1024, donors=3)
    outer = msgspec.structs.replace(spec.outer, stages=(Stage(0, 4),), fragments=fragments, merge=merge)
    data = msgspec.structs.replace(spec.data, source="synthetic:markov?size=65536")
    return msgspec.structs.replace(spec, outer=outer, data=data)


@pytest.mark.parametrize(("overlap_steps", "fragments"), [pytest.param(0, 1, marks=SLOW), (2, 2)])
def test_four_nodes_merge_alike_while_one_is_killed_and_comes_back(world, overlap_steps, fragments):
    torch.set_num_threads(1)
    seen = Seen({}, {}, {}, {})
    worker = partial(RealWorker, seen=seen)

    async def story() -> None:
        adjust = partial(merging, fragments=fragments)
        async with world(ROUNDS, 4, worker=worker, adjust=adjust, holders=1, overlap_steps=overlap_steps) as w:
            for number in range(4):
                w.start(number)
            await w.until(lambda: w.newest() >= 3)
            await w.kill(2)
            await w.until(lambda: w.newest() >= 7)
            w.start(2)
            await w.until(w.all_final)
            w.check_agreement()
            await w.check_feeds()
            assert len({node.worker.state for node in w.nodes.values()}) == 1
            assert max(w.nodes[2].worker.trained) >= ROUNDS - 2, "it takes part again"
            assert any(merge_after_round(w.spec, at) is not None and seen.final_sets[at] for at in range(ROUNDS))
            assert both_before_and_after(seen.finals) > 10

    run_virtual(story())
