"""Whole nodes with real workers train the smallest presets, and slices, as `run new --guard` makes them."""

import json
from functools import partial

import pytest
import torch
from msgspec.structs import replace

from atoll.node.runs.guard import Defences, defences_of, guarded
from atoll.node.runs.presets import preset
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.ids import digest
from atoll.protocols.local.worker_messages import EvaluateRequest
from atoll.protocols.run.run_spec import Stage
from tests.node.virtual.real_worker import RealWorker, Seen

NODES, ROUNDS = 3, 4


def guarded_small(plain, name, slices=0):
    """The preset with its own model and recipe, of fewer rounds and sequences of a step."""
    spec = preset(name, plain.owner, plain.seed, "synthetic:markov?size=65536", digest(b""))
    spec = replace(spec, data=replace(spec.data, digest=b""), name="virtual", pace=plain.pace)
    outer = replace(spec.outer, rounds=ROUNDS, stages=(Stage(0, 4),), overlap_steps=0)
    inner = replace(spec.inner, batch=2, warmup_steps=1, total_steps=ROUNDS * 4)
    if slices:
        outer = replace(outer, holders=1024)
        spec = replace(spec, model=replace(spec.model, ffn_slices=slices), reduce=None)
    return guarded(replace(spec, outer=outer, inner=inner))


MIXTURE = pytest.param(
    "moe-smoke",
    0,
    3,
    marks=pytest.mark.slow(slice="test_a_guarded_run_trains_with_all_that_it_can_have[tiny-0-3]"),
)

SLICES = pytest.param(
    "tiny",
    5,
    0,
    marks=pytest.mark.slow(slice="test_a_guarded_run_trains_with_all_that_it_can_have[tiny-0-3]"),
)


@pytest.mark.parametrize(("name", "slices", "each"), [("tiny", 0, 3), MIXTURE, SLICES])
def test_a_guarded_run_trains_with_all_that_it_can_have(world, name, slices, each):
    torch.set_num_threads(1)
    seen, losses = Seen({}, {}, {}, {}), []

    adjust = partial(guarded_small, name=name, slices=slices)

    def worker(*args):
        return RealWorker(*args, seen=seen)

    async def story() -> None:
        async with world(ROUNDS, NODES, worker=worker, adjust=adjust, min_members=NODES) as w:
            assert defences_of(w.spec) == Defences("nnm", each, 8, 64, 0, 0, voters=each > 0)
            for number in range(NODES):
                w.start(number)
            await w.until(lambda: all(node.worker.session is not None for node in w.nodes.values()))
            losses.append(w.nodes[0].worker.session.answer(EvaluateRequest()).val_loss)
            await w.until(w.all_final)
            w.check_agreement()
            losses.append(w.nodes[0].worker.session.answer(EvaluateRequest()).val_loss)
            assert len({node.worker.state for node in w.nodes.values()}) == 1
            assert all(len(names) == NODES for names in seen.final_sets.values())
            audits = [
                row["peer"]
                for node in w.nodes.values()
                for row in map(json.loads, (node.home / "events.jsonl").read_text().splitlines())
                if row["event"] == "audited"
            ]
            assert set(audits) == ({node.peer for node in w.nodes.values()} if each else set())

    run_virtual(story())
    assert losses[1] < 0.95 * losses[0]
