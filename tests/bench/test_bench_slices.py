"""`bench slices`: its arms fold what workers fold, its rows judge means and each seed, ended arms are stored."""

import asyncio

import msgspec
import pytest
from msgspec.structs import replace

from atoll.node.learning.data.dataset import open_dataset
from atoll.node.learning.data.shakespeare import default_cache
from atoll.protocols.run.experts import ALL, experts_in
from atoll_bench.experts.experts_members import MEMBERS, Members
from atoll_bench.experts.experts_trial import Trial
from atoll_bench.reference_arms.baselines import Point
from atoll_bench.slices import slices
from atoll_bench.slices.slices_plans import ARMS, SLICES, Arm, shares_of, spec_of


def arm_of(kind, seed=1, steps=1):
    return Arm(kind, "tiny", steps, 2, seed, 1)


def test_a_trial_has_the_state_of_members_that_are_workers(tmp_path):
    arm = arm_of("one")
    spec = spec_of(arm)
    spec = replace(spec, data=replace(spec.data, source="synthetic:markov?size=262144"))
    data = open_dataset(spec.data, spec.model.context, "", default_cache(), None)
    shares = shares_of(arm)
    trial = Trial(spec, data, MEMBERS, tmp_path / "trial")
    points = list(trial.rounds(lambda _: shares))
    members = Members(tmp_path / "workers", spec, MEMBERS)
    for number in range(2):
        sent = [members.contribute(slot, number, experts) for slot, experts in shares.items()]
        states = members.finalize(number, sent)
    assert states == {trial.fold.state_digest()}
    assert len(points) == 2


@pytest.mark.parametrize(("kind", "holders"), [("one", 1), ("two", 2)])
def test_each_slice_has_as_many_holders_as_the_arm_says(kind, holders):
    held = [experts_in(bitmap, SLICES) for bitmap in shares_of(arm_of(kind)).values()]
    assert [sum(one in each for each in held) for one in range(SLICES)] == [holders] * SLICES


def test_the_other_arms_are_what_their_names_say():
    assert list(shares_of(arm_of("whole")).values()) == [ALL] * 4
    assert list(shares_of(arm_of("pair")).values()) == [ALL] * 2
    mixed = shares_of(arm_of("mixed"))
    assert [len(experts_in(bitmap, SLICES)) for bitmap in mixed.values()] == [4, 4, 1, 1]
    assert spec_of(arm_of("mixed")).outer.holders == 4


def curve(loss):
    return [Point(0, 1, 9.0, 9.0, 0.1), Point(1, 2, loss, loss, 0.2)]


def losses(**of):
    return {arm_of(kind, seed): curve(loss) for kind, each in of.items() for seed, loss in enumerate(each, 1)}


def judged(curves):
    return {row.metric.partition(": ")[2]: row.passed for row in slices.rows_of(curves) if row.bar}


def test_one_holder_is_judged_by_the_mean_and_two_alone_by_each_seed():
    good = losses(whole=(3.0, 3.0), one=(3.12, 3.0), two=(3.03, 3.03), mixed=(3.02, 3.02), pair=(3.1, 3.1))
    assert set(judged(good).values()) == {True}
    ends = {"one": (3.2, 3.0), "two": (3.1, 3.0), "mixed": (3.11, 3.02)}
    for kind, each in ends.items():
        name = f"{ARMS[kind]} / {ARMS['pair' if kind == 'mixed' else 'whole']}"
        changed = {arm: curve(each[arm.seed - 1]) if arm.kind == kind else found for arm, found in good.items()}
        assert judged(changed)[name] is False, kind


def test_a_stored_arm_is_not_trained_again(tmp_path):
    arm = arm_of("one")
    stored = tmp_path / f"{arm.name}.json"
    stored.write_bytes(msgspec.json.encode(curve(2.5)))

    def never(line):
        raise AssertionError(line)

    assert asyncio.run(slices.curve_of(arm, tmp_path, never)) == curve(2.5)
    assert arm.name != arm._replace(slice_lr=2.0).name, "another recipe has another file"


@pytest.mark.slow(slice="test_a_trial_has_the_state_of_members_that_are_workers")
def test_quick_trains_every_arm():
    rows = asyncio.run(slices.measure(True, lambda line: None))
    assert all(row.value is not None for row in rows)
