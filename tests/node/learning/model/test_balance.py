"""The bias controller: moves towards its target, leaves zero experts alone, and reaches what it is asked for."""

import pytest
import torch

from atoll.node.learning.inner.step_share import ALONE
from atoll.node.learning.model.bridge import write_atoms
from atoll.node.learning.model.moe import Mixture, RouterLoads, move_biases, target_share, updated_bias
from atoll.protocols.run.model_spec import ExpertsSpec

EXPERTS = ExpertsSpec(count=4, per_token=3, ffn=8, zero=4, computed=1.5, bias_rate=0.01)


def test_target_is_the_share_of_rows_of_one_expert():
    assert target_share(EXPERTS) == pytest.approx(1.5 / 3 / 4)
    assert target_share(ExpertsSpec(count=8, per_token=2, ffn=1, bias_rate=0.1)) == pytest.approx(1 / 8)


def test_who_got_too_little_rises_and_zero_experts_stay():
    bias = torch.zeros(8)
    found = updated_bias(bias, torch.tensor([30, 0, 10, 10, 20, 10, 0, 0]), EXPERTS)
    assert found[0] < 0 < found[1]
    assert float(found[2]) == pytest.approx(0.01 * (0.125 - 10 / 80), abs=1e-9)
    assert not found[4:].any()
    assert not bias.any(), "the argument is not touched"


def test_nothing_seen_is_no_reason_to_divide_by_zero():
    assert bool(updated_bias(torch.zeros(8), torch.zeros(8, dtype=torch.int64), EXPERTS).isfinite().all())


@pytest.mark.parametrize("computed", [1.0, 1.5, 2.25])
def test_the_mean_number_of_computed_experts_reaches_the_target(computed):
    experts = ExpertsSpec(count=4, per_token=3, ffn=8, zero=4, computed=computed, bias_rate=0.05)
    made = Mixture(16, experts, frozenset(), torch.float32, False)
    source = torch.Generator().manual_seed(0)
    write_atoms(made, [("gate.weight", torch.randn(8, 16, generator=source) * 0.2)])
    shares = []
    for step in range(300):
        slots = made.gate(torch.randn(256, 16, generator=source)).slot_Nk.detach()
        made.seen_S += slots.flatten().bincount(minlength=8)
        shares.append(float((slots < 4).float().sum(1).mean()))
        move_biases(made, experts, ALONE.total)
        assert not made.seen_S.any(), step
    assert sum(shares[-100:]) / 100 == pytest.approx(computed, rel=0.01)


def test_a_forward_counts_only_where_it_learns():
    made = Mixture(16, EXPERTS, frozenset({0}), torch.float32, False)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    for buffer in made.experts.shelf.buffers():
        torch.nn.init.normal_(buffer)
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        made(x, None)
    assert not made.seen_S.any()
    made(x, RouterLoads())
    assert int(made.seen_S.sum()) == 30
