"""Trials: gossip with one merge by the product's draw and mixing, and weights for work of an old base."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from atoll.node.learning.data.dataset import open_dataset
from atoll.node.learning.data.shakespeare import default_cache
from atoll.node.learning.outer.fixed import to_fixed
from atoll.protocols.run.payload import payload_bytes
from atoll.protocols.run.sections.variants.gossip import GossipSpec
from atoll_bench.convergence.arms import MEMBERS, arm_of, spec_of
from atoll_bench.convergence.crew import CrewRounds
from atoll_bench.convergence.gossip import Gossip
from atoll_bench.convergence.trial import _Rounds
from atoll_bench.convergence.unequal import (
    FAST,
    LATE_WAYS,
    OLD,
    STEPS,
    WAYS,
    Late,
    Unequal,
    Way,
    by_age,
    by_steps,
    even,
)
from atoll_bench.reference_arms.baselines import Task


def task_of(rounds, steps):
    torch.set_num_threads(1)
    spec = spec_of(arm_of("average-float32", "micro", total=steps * rounds, seed=1, steps=steps))
    spec = replace(spec, data=replace(spec.data, source="synthetic:markov?size=262144"))
    data = open_dataset(spec.data, spec.model.context, "", default_cache())
    return Task(spec, data, MEMBERS, rounds)


# --- members in one pass ---------------------------------------------------------------------


def test_members_in_one_pass_train_as_the_learners_of_workers(tmp_path):
    task = task_of(2, 4)
    alone, together = _Rounds(task, tmp_path, exact=True), CrewRounds(task, tmp_path, exact=True)
    for number in range(2):
        assert np.mean(together.round(number)) == pytest.approx(np.mean(alone.round(number)), abs=1e-5)
    moved = (alone.fold.view_C4096 - together.fold.view_C4096).abs().max().item() * 2.0**-24
    assert moved < 2e-5, "the order of sums alone differs"


# --- gossip -----------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [0, 1])
def test_one_round_and_the_merge_are_a_round_of_averaging(every, tmp_path):
    task = task_of(1, 2)
    averaged = CrewRounds(task, tmp_path, exact=True)
    gossip = Gossip(task, tmp_path, every)
    averaged.round(0)
    gossip.round(0)
    merged_C4096 = to_fixed(gossip.weights().mean(dim=0))
    assert int((merged_C4096 - averaged.fold.view_C4096).abs().max()) <= 1
    assert gossip.bytes == 4 * task.spec.model.parameters * every
    assert all(torch.equal(each, gossip.weights()[0]) for each in gossip.weights()) is bool(every)


def test_pairs_pull_at_a_tick_and_all_keep_their_mean(tmp_path):
    """Lengths differ a little, and the clip takes the longer one's rest away."""
    task = task_of(3, 2)
    plain = Gossip(task, tmp_path / "plain", 0)
    gossip = Gossip(task, tmp_path / "gossip", GossipSpec(first_256=256, last_256=256))
    plain.round(0), gossip.round(0)
    before, after = plain.weights(), gossip.weights()
    moved = [not torch.equal(one, other) for one, other in zip(before, after, strict=True)]
    assert all(moved), "each of eight has a neighbour at a chance of one"
    step = (before - plain._base_MC4096).norm(dim=(1, 2)).mean()
    assert (before.mean(dim=0) - after.mean(dim=0)).norm() < 0.05 * step
    assert after.std(dim=0).norm() < 0.9 * before.std(dim=0).norm()
    assert gossip.bytes == payload_bytes("int8", before.shape[1], 4096)


# --- work of an old base ----------------------------------------------------------------------


def test_weights_are_whole_numbers_of_steps_and_ages():
    assert [even(4, 3), by_steps(STEPS, 0), by_steps(4, 0)] == [64, 64, 16]
    assert [by_age(STEPS, age) for age in range(4)] == [64, 45, 36, 32]


def test_equally_fast_members_are_rounds_of_averaging(tmp_path):
    task = task_of(2, STEPS)
    averaged, unequal = CrewRounds(task, tmp_path, exact=True), Unequal(task, tmp_path, WAYS["all fast"])
    for number in range(2):
        assert averaged.round(number)
        unequal.round(number)
    assert int((averaged.fold.view_C4096 - unequal.fold.view_C4096).abs().max()) <= 1


def seen_by(way, rounds, tmp_path):
    """Steps and age of all work that counts, by outer step."""
    seen = []

    def weigh(steps, age):
        seen.append((arm.fold.final_round + 1, steps, age))
        return 64

    arm = Unequal(task_of(rounds, STEPS), tmp_path, way._replace(weigh=weigh))
    for number in range(rounds):
        arm.round(number)
    return [[(steps, age) for at, steps, age in seen if at == step] for step in range(arm.fold.final_round + 1)]


def test_slow_members_are_in_a_round_by_turns_with_work_of_three_steps_before(tmp_path):
    *_, last = seen_by(WAYS["old work, weight 1"], 6, tmp_path)
    assert sorted(last) == [(STEPS, 0)] * FAST + [(STEPS, 3)]


def test_fedfix_weighs_slow_members_four_times_as_much_as_fast_ones(tmp_path):
    seen = []

    class Seen(Unequal):
        def _weight(self, work):
            seen.append((self.fold.final_round + 1, work.slot, super()._weight(work)))
            return seen[-1][2]

    arm = Seen(task_of(9, STEPS), tmp_path, WAYS["old work, FedFix"])
    for number in range(9):
        arm.round(number)
    last = {slot: weight for at, slot, weight in seen if at == 8}
    assert sorted(last.values()) == [7] * FAST + [28]


def test_parts_of_rounds_are_a_quarter_of_the_steps_and_never_old(tmp_path):
    found = seen_by(WAYS["parts of rounds, by steps"], 2, tmp_path)
    assert [sorted(each) for each in found] == [[(4, 0)] * FAST + [(STEPS, 0)] * FAST] * 2


def test_a_buffer_makes_a_step_of_as_much_work_as_it_holds(tmp_path):
    found = seen_by(Way(even, OLD, buffer=2), 3, tmp_path)
    assert {len(each) for each in found} == {2}
    assert len(found) >= 6
    assert {age for _, age in found[-1]} - {0}, "others' steps lie between a base and its work"


@pytest.mark.parametrize("way", LATE_WAYS)
def test_late_work_counts_once_or_returns_or_is_lost(way, tmp_path):
    counted = []

    class Seen(Late):
        def _exact_update(self, fresh, theta_N4096):
            counted.append([(self._sent_exactly[one.path].abs().sum(), one.weight) for one in fresh.members])
            return super()._exact_update(fresh, theta_N4096)

    arm = Seen(task_of(3, 1), tmp_path, way)
    for number in range(3):
        arm.round(number)
    total, kept = sum(map(len, counted)), len(arm._kept)
    if way.startswith("next round"):
        assert total + kept == 3 * MEMBERS
        assert {weight for each in counted for _, weight in each} == {64, 64 if "weight 1" in way else 45}
    else:
        assert total < 3 * MEMBERS
        assert bool(kept) is (way == "returns")
