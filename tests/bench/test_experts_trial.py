"""The trial of `bench experts --loss`: what it folds is what members of a swarm would fold."""

from msgspec.structs import replace

from atoll.node.learning.data.dataset import open_dataset
from atoll.node.learning.data.shakespeare import default_cache
from atoll_bench.experts.experts_arm import spec_of
from atoll_bench.experts.experts_members import MEMBERS, Members
from atoll_bench.experts.experts_plans import plan_of
from atoll_bench.experts.experts_trial import Trial


def small(arm):
    spec = spec_of(arm, "moe-smoke", 3, 1, 7)
    return replace(
        spec, inner=replace(spec.inner, batch=1), data=replace(spec.data, source="synthetic:markov?size=262144")
    )


def test_a_trial_has_the_state_of_members_that_are_workers(tmp_path):
    spec = small("shared")
    data = open_dataset(spec.data, spec.model.context, "", default_cache(), None)
    plan = plan_of(spec, "shared")
    trial = Trial(spec, data, MEMBERS, tmp_path / "trial")
    points = list(trial.rounds(plan))
    members = Members(tmp_path / "workers", spec, MEMBERS)
    for number in range(3):
        sent = [members.contribute(slot, number, experts) for slot, experts in plan(number).items()]
        states = members.finalize(number, sent)
    assert states == {trial.fold.state_digest()}
    assert [point.round for point in points] == [0, 1, 2]
    assert points[-1].tokens == 3 * MEMBERS * spec.model.context
