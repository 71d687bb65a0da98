"""Whole nodes with real workers; one of five sends what ruins the mean, and nobody is told which."""

from functools import partial

import msgspec
import pytest
import torch

from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.local.worker_messages import EvaluateRequest
from atoll.protocols.run.run_spec import Stage
from tests.node.virtual.real_worker import RealWorker, Seen

ROUNDS, NODES = 6, 5


class Liar(RealWorker):
    """It trains at a rate hundreds of times too high and claims that it is the run's."""

    def __init__(self, folder, me, train_s, spec, seen) -> None:
        fast = msgspec.structs.replace(spec.inner, lr=1.0)
        super().__init__(folder, me, train_s, msgspec.structs.replace(spec, inner=fast), seen)


def judged(spec, rule):
    outer = msgspec.structs.replace(spec.outer, stages=(Stage(0, 10),), floor_256=64, aggregate=rule)
    data = msgspec.structs.replace(spec.data, source="synthetic:markov?size=65536")
    inner = msgspec.structs.replace(spec.inner, lr=3e-3)
    return msgspec.structs.replace(spec, outer=outer, data=data, inner=inner)


def loss_after(world, rule) -> tuple[float, float]:
    """Validation loss before the first round and after the last one."""
    torch.set_num_threads(1)
    seen, made, losses = Seen({}, {}, {}, {}), [], []

    def worker(*args, **more):
        made.append(None)
        kind = Liar if len(made) == NODES else RealWorker
        return kind(*args, **more, seen=seen)

    def look(node):
        losses.append(node.worker.session.answer(EvaluateRequest()).val_loss)

    async def story() -> None:
        async with world(ROUNDS, NODES, worker=worker, adjust=partial(judged, rule=rule)) as w:
            for number in range(NODES):
                w.start(number)
            await w.until(lambda: all(node.worker.session is not None for node in w.nodes.values()))
            look(w.nodes[0])
            await w.until(w.all_final)
            w.check_agreement()
            assert sum(isinstance(node.worker, Liar) for node in w.nodes.values()) == 1
            assert len({node.worker.state for node in w.nodes.values()}) == 1
            assert all(len(names) == NODES for names in seen.final_sets.values()), "the liar counts, too"
            look(w.nodes[0])

    run_virtual(story())
    return losses[0], losses[-1]


CLIP = pytest.param(
    "clip",
    marks=pytest.mark.slow(slice="test_one_liar_among_five_costs_a_run_with_a_rule_less"),
)


@pytest.mark.parametrize("rule", [CLIP, "nnm"])
def test_one_liar_among_five_costs_a_run_with_a_rule_less(world, rule):
    before, plain = loss_after(world, msgspec.UNSET)
    after = loss_after(world, rule)[1]
    assert after < 0.6 * before
    assert after < plain - 0.3
