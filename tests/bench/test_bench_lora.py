"""The figures of LoRA runs: members of a bench are workers, and an adapter's costs are below the model's."""

from atoll_bench.lora import costs, loss
from atoll_bench.lora.members import GivenMembers, genesis_state, given, write_given


def test_members_on_given_weights_have_one_digest_and_begin_with_one_loss(tmp_path):
    spec = loss.spec_of(1, "synthetic:markov?size=262144", rounds=2, steps=1, batch=1, rate=1e-3)
    start = write_given(tmp_path / "given", spec.model, genesis_state(spec.model, 1))
    losses, sent = [], []
    for rank in (0, 4):
        made = given(spec, start, rank)
        made.check()
        members = GivenMembers(tmp_path / str(rank), made, tmp_path / "given", 2)
        losses.append(members.loss())
        members.round(0)  # raises where two members fold to two states
        assert members.loss() != losses[-1]
        sent.append(members.payload_bytes[0])
    assert losses[0] == losses[1], "both begin with the given weights"
    assert sent[1] < sent[0] / 4


def test_each_arm_of_the_costs_runs_the_preset_with_adamw(tmp_path):
    spec = costs.spec_of("50m")
    assert (spec.inner.optimizer, spec.steps(0), spec.inner.batch) == ("adamw", 1, 1)
    assert costs.measured("tiny", "nothing", 8, tmp_path / "none", tmp_path)["rss"] > 1 << 26
