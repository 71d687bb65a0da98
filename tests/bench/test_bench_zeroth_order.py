"""The figures of zeroth-order runs: members are workers of given weights, and their costs are below AdamW's."""

from atoll_bench.lora import loss as lora_loss
from atoll_bench.lora.members import GivenMembers, genesis_state, write_given
from atoll_bench.zeroth_order import costs
from atoll_bench.zeroth_order.loss import scalar_spec


def test_members_on_given_weights_have_one_digest_and_send_one_byte_a_step(tmp_path):
    spec = lora_loss.spec_of(1, "synthetic:markov?size=262144", rounds=2, steps=2, batch=1, rate=1e-4)
    start = write_given(tmp_path / "given", spec.model, genesis_state(spec.model, 1))
    for rank in (0, 4):
        members = GivenMembers(tmp_path / str(rank), scalar_spec(spec, start, rank), tmp_path / "given", 2)
        before = members.loss()
        members.round(0)  # raises where two members fold to two states
        assert members.loss() != before
        assert members.payload_bytes == [14, 14]


def test_the_arms_of_the_costs_are_spsa_and_adamw_on_the_same_weights(tmp_path):
    sizes = {}
    for arm in ("adamw", "spsa"):
        (tmp_path / arm).mkdir()
        sizes[arm] = costs.measured("tiny", arm, tmp_path / arm)
    assert sizes["spsa"]["payload"] == 13
    assert sizes["spsa"]["state"] < 0.3 * sizes["adamw"]["state"]
