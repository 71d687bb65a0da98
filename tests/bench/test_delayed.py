"""Delayed folds: without delay they are the blocking round, to the bit; with it the laws of the two rules hold."""

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.learning.data.dataset import open_dataset
from atoll.node.learning.outer.fixed import plus, to_fixed, to_float
from atoll.node.runs import presets
from atoll.node.runs.presets import finer
from atoll.protocols.ids import peer_id_of
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.run_spec import Stage
from atoll_bench.module_values import fill_module, read_module
from atoll_bench.reference_arms.baselines import Task, member_round
from tests.bench.delayed import LateRule, delayed_sparse
from tests.plain import feedback, sparse2
from tests.plain.mean import outer_update


@pytest.fixture
def spec():
    whole = presets.preset("tiny", peer_id_of(bytes(range(32))), 3, "synthetic:markov?seed=1&size=65536")
    replace = msgspec.structs.replace
    return replace(
        whole,
        model=replace(whole.model, dim=32, layers=1, heads=2, kv_heads=1, ffn=32, context=16),
        outer=replace(whole.outer, rounds=4, stages=(Stage(0, 1), Stage(2, 4))),
        inner=replace(whole.inner, batch=2, warmup_steps=2, total_steps=10, lr=5e-3),
    )


def task_of(spec, members, tmp_path):
    torch.set_num_threads(1)
    return Task(spec, open_dataset(spec.data, spec.model.context, "", tmp_path), members, spec.outer.rounds)


def curve(points):
    return [(p.round, p.tokens, p.train_loss, p.val_bpb) for p in points]


def blocking(task):
    """Scores of the round as the swarm runs it: everyone starts from the view."""
    spec, arena = task.spec, arena_of(task.spec.model)
    theta = to_fixed(task.genesis_C4096())
    members = [task.inner() for _ in range(task.members)]
    residuals = [torch.zeros((arena.chunks, 4096)) for _ in members]
    for number in range(task.rounds):
        losses, sent = [], []
        for slot, inner in enumerate(members):
            losses += member_round(task, inner, to_float(theta), number, slot)
            delta = to_float(theta) - read_module(inner.module, arena)
            payload = feedback.feed(residuals[slot], delta, spec.compress.feedback, spec.compress.k)
            sent.append((1, *sparse2.decode(payload, arena.chunks, spec.compress.k)))
        update = outer_update(sent, arena.chunks, spec.outer.alpha_256, spec.outer.floor_256)
        theta = plus(theta, update)
        fill_module(members[0].module, to_float(theta), arena)
        yield task.point(number, losses, members[0].module, 0.0)


@pytest.mark.parametrize("rule", [LateRule("rebase", 1.0), LateRule("rebase", 0.5), LateRule("forecast", 1.0)])
def test_without_delay_a_late_rule_is_the_blocking_round_to_the_bit(spec, tmp_path, rule):
    task = task_of(spec, 2, tmp_path)
    assert curve(delayed_sparse(task, rule)) == curve(blocking(task))


def test_a_lone_member_forecasts_the_view(spec, tmp_path):
    task = task_of(spec, 1, tmp_path)
    for late, now in zip(delayed_sparse(task, LateRule("forecast", 1.0), 4), blocking(task), strict=True):
        assert late.val_bpb == pytest.approx(now.val_bpb, abs=1e-4)


def test_keeping_nothing_is_one_rule(spec, tmp_path):
    task = task_of(spec, 2, tmp_path)
    assert curve(delayed_sparse(task, LateRule("rebase", 0.0), 2)) == curve(
        delayed_sparse(task, LateRule("blend", 0.0), 2)
    )


def test_a_delay_is_felt_and_ends_with_the_next_round(spec, tmp_path):
    task = task_of(spec, 2, tmp_path)
    curves = [curve(delayed_sparse(task, LateRule("rebase", 1.0), delay)) for delay in (0, 2, 4, 400)]
    assert curves[0] != curves[1] != curves[2]
    assert curves[2] == curves[3]


def test_thrown_away_rounds_teach_nothing(spec, tmp_path):
    first, *later = delayed_sparse(task_of(spec, 2, tmp_path), LateRule("rebase", 0.0), 4)
    assert later[-1].tokens > first.tokens
    assert later[-1].val_bpb == pytest.approx(first.val_bpb, abs=0.05)


def test_tokens_are_those_of_all_members_whatever_the_fragments(spec, tmp_path):
    fine = msgspec.structs.replace(spec, outer=finer(spec.outer, 2))
    whole = list(delayed_sparse(task_of(spec, 3, tmp_path), LateRule("rebase", 1.0), 1))
    parts = list(delayed_sparse(task_of(fine, 3, tmp_path), LateRule("rebase", 1.0), 1, fragments=2))
    assert [p.tokens for p in whole] == [steps * 3 * 2 * 16 for steps in (1, 2, 6, 10)]
    assert [p.tokens for p in parts] == [steps * 3 * 2 * 16 for steps in (2, 6, 10)]


@pytest.mark.parametrize(
    ("rule", "delay", "fragments"),
    [(LateRule("rebase", 1.0), 4, 1), (LateRule("blend", 0.5), 2, 1), (LateRule("rebase", 1.0), 2, 2)],
)
def test_late_folds_learn(spec, tmp_path, rule, delay, fragments):
    longer = msgspec.structs.replace(spec.outer, rounds=20)
    steady = msgspec.structs.replace(spec.inner, total_steps=80)
    fine = msgspec.structs.replace(spec, outer=finer(longer, fragments), inner=steady)
    points = list(delayed_sparse(task_of(fine, 2, tmp_path), rule, delay, fragments))
    assert points[-1].val_bpb < points[0].val_bpb - 1


FLOATS = st.integers(-64, 64).map(lambda n: torch.tensor([n / 8]))


@given(FLOATS, FLOATS, FLOATS)
def test_a_rebase_keeps_the_steps_and_a_blend_keeps_the_weights(local, anchor, view):
    assert torch.equal(LateRule("rebase", 1.0).merged(local, anchor, view), view + local - anchor)
    assert torch.equal(LateRule("rebase", 0.5).merged(local, local, view), view)
    assert torch.equal(LateRule("blend", 0.5).merged(local, anchor, view), (local + view) / 2)
