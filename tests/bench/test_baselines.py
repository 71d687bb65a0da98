"""Baselines: the laws that tie them to each other, on a model of a few thousand parameters."""

from itertools import pairwise

import msgspec
import pytest
import torch

from atoll.cli.sim.swarm import prepare
from atoll.node.learning.data.dataset import open_dataset
from atoll.node.runs import presets
from atoll.protocols.ids import peer_id_of
from atoll.protocols.run.model_spec import ExpertsSpec
from atoll.protocols.run.run_spec import Stage
from atoll_bench.reference_arms.arm import arm as trained_arm
from atoll_bench.reference_arms.baselines import (
    AVERAGE,
    DILOCO,
    TUNED,
    OuterRule,
    Task,
    data_parallel,
    dense_diloco,
)


@pytest.fixture
def spec():
    whole = presets.preset("tiny", peer_id_of(bytes(range(32))), 3, "synthetic:markov?seed=1&size=65536")
    replace = msgspec.structs.replace
    return replace(
        whole,
        model=replace(whole.model, dim=32, layers=1, heads=2, kv_heads=1, ffn=32, context=16),
        outer=replace(whole.outer, rounds=4, stages=(Stage(0, 1), Stage(2, 3))),
        inner=replace(whole.inner, batch=2, warmup_steps=2, total_steps=8, lr=5e-3),
    )


def task_of(spec, members, tmp_path):
    torch.set_num_threads(1)
    return Task(spec, open_dataset(spec.data, spec.model.context, "", tmp_path), members, spec.outer.rounds)


def curve(points):
    return [(p.round, p.tokens, p.train_loss, p.val_bpb) for p in points]


def test_one_member_averaged_is_plain_training(spec, tmp_path):
    task = task_of(spec, 1, tmp_path)
    for a, b in zip(data_parallel(task), dense_diloco(task, AVERAGE), strict=True):
        assert (a.round, a.tokens) == (b.round, b.tokens)
        assert a.val_bpb == pytest.approx(b.val_bpb, abs=1e-4)
        assert a.train_loss == pytest.approx(b.train_loss, abs=1e-4)


def test_tokens_are_those_of_all_members(spec, tmp_path):
    points = list(data_parallel(task_of(spec, 3, tmp_path)))
    assert [p.tokens for p in points] == [steps * 3 * 2 * 16 for steps in (1, 2, 5, 8)]
    assert [p.round for p in points] == [0, 1, 2, 3]
    assert all(a.seconds < b.seconds for a, b in pairwise(points))


def test_a_baseline_repeats_to_the_bit(spec, tmp_path):
    task = task_of(spec, 2, tmp_path)
    assert curve(dense_diloco(task, DILOCO)) == curve(dense_diloco(task, DILOCO))


def test_both_learn(spec, tmp_path):
    longer = msgspec.structs.replace(spec, outer=msgspec.structs.replace(spec.outer, rounds=30))
    task = task_of(longer, 2, tmp_path)
    for points in (list(data_parallel(task)), list(dense_diloco(task, AVERAGE)), list(dense_diloco(task, DILOCO))):
        assert points[-1].val_bpb < points[0].val_bpb - 1


def test_nesterov_without_momentum_is_averaging(spec, tmp_path):
    task = task_of(spec, 2, tmp_path)
    assert curve(dense_diloco(task, OuterRule(1.0, 0.0))) == curve(dense_diloco(task, AVERAGE))
    assert curve(dense_diloco(task, DILOCO)) != curve(dense_diloco(task, AVERAGE))


def test_the_rate_of_data_parallel_can_be_tuned(spec, tmp_path):
    task = task_of(spec, 2, tmp_path)
    assert curve(data_parallel(task, 2.0)) != curve(data_parallel(task, 1.0))


def test_each_arm_trains_by_its_own_rule(tmp_path):
    swarm = prepare(
        tmp_path, nodes=2, rounds=2, steps=1, seed=1, preset_name="tiny", data="synthetic:markov?size=65536"
    )
    task = task_of(swarm.spec, 2, tmp_path)._replace(rounds=1, present=[2])
    task = task._replace(spec=msgspec.structs.replace(task.spec, inner=presets.with_adamw(task.spec.inner)))
    dense = {name: dense_diloco(task, rule) for name, rule in (("diloco", TUNED), ("average", AVERAGE))}
    found = set()
    for name, points in {**dense, "adamw": data_parallel(task)}.items():
        (trained,) = trained_arm(name, swarm.run_file, tmp_path, [2], 1)["points"]
        (point,) = points
        assert (trained["val_bpb"], trained["tokens"]) == (point.val_bpb, 2 * 8 * 128), name
        found.add(point.val_bpb)
    assert len(found) == 3


def test_members_that_are_away_are_missed_in_both_arms(spec, tmp_path):
    steady = task_of(spec, 2, tmp_path)
    same, fewer = steady._replace(present=[2] * 4), steady._replace(present=[2, 1, 1, 2])
    for arm in (data_parallel, dense_diloco):
        assert curve(arm(same)) == curve(arm(steady))
        assert [p.tokens for p in arm(fewer)] == [32 * count for count in (2, 3, 6, 12)]
        assert curve(arm(fewer))[0] == curve(arm(steady))[0]
        assert curve(arm(fewer))[1:] != curve(arm(steady))[1:]


def test_a_factor_for_few_holders_is_not_for_arms_that_train_all_experts(spec, tmp_path):
    replace = msgspec.structs.replace
    experts = ExpertsSpec(count=4, per_token=2, ffn=16)
    mixture = replace(spec, model=replace(spec.model, experts=experts), reduce=None)

    def found(holders, expert_lr):
        outer, inner = replace(mixture.outer, holders=holders), replace(mixture.inner, expert_lr=expert_lr)
        task = task_of(replace(mixture, outer=outer, inner=inner), 1, tmp_path)
        return curve(data_parallel(task))

    assert found(1, 2.0) == found(0, 1.0) != found(0, 2.0)
