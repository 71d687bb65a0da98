"""A slow momentum beside the gradient: against its formula, AdamW at a share of 1, a golden trajectory, memory."""

import json
import math
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from atoll.node.learning.inner.adamw import adamw_step
from atoll.node.learning.inner.loop import learning_rate
from atoll.node.learning.inner.moments import pack, second_moment_bound, unpack
from atoll.node.learning.inner.slow_momentum import slow_momentum_step
from atoll_bench.inner_steps import run_steps
from tests.node.learning.inner.test_inner import inner_spec
from tests.node.learning.inner.test_muon import MODELS, gradients_of, replica_of, values_of, windows_of
from tests.plain.muon import PlainAdamW

GOLDEN = Path(__file__).parents[3] / "golden" / "slow_momentum.json"
SLOW = inner_spec(
    beta1=0.995, beta2=0.999, momentum_share=0.9, clip=0.5, total_steps=40, warmup_steps=4, lr=5e-3
)  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_steps_follow_the_formula(name):
    """The gradients are the product's own; all that follows from them is written out again."""
    torch.set_num_threads(1)
    made, beside = replica_of(name, SLOW), replica_of(name, SLOW)
    plain = {
        atom: PlainAdamW(value.numpy(), SLOW, SLOW.weight_decay if value.dim() > 1 else 0.0)
        for atom, value in values_of(made.inner).items()
    }
    for step in range(8):
        beside.module.load_state_dict(made.module.state_dict())
        found = gradients_of(beside, windows_of(step))
        norm = math.sqrt(sum(float((g**2).sum()) for g in found.values()))
        made.inner.step(windows_of(step), step)
        for atom, each in plain.items():
            each.step(found[atom] * min(1, SLOW.clip / (norm + 1e-6)), learning_rate(SLOW, step))
    for atom, value in values_of(made.inner).items():
        close = torch.allclose(value.double(), torch.from_numpy(plain[atom].value), atol=3e-5)
        assert close, atom


def tensors(count=1):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(5, 3, generator=generator) for _ in range(count)]


def ran(step, spec, gradients, rate=1e-2):
    """The value after these gradients, from a fixed start."""
    value, first, second, steps = tensors()[0], torch.zeros(5, 3), torch.zeros(5, 3), torch.zeros(())
    for gradient in gradients:
        step([value], [gradient.clone()], [first], [second], [steps], spec, rate, 0.1)
    return value, first, second, steps


def test_with_the_whole_share_it_is_adamw():
    spec = replace(SLOW, momentum_share=1.0)
    found = (ran(step, spec, tensors(9)) for step in (slow_momentum_step, adamw_step))
    for own, torchs in zip(*found, strict=True):
        assert torch.allclose(own, torchs, atol=1e-6)


def test_a_common_direction_is_still_there_after_a_round_and_the_gradient_counts_at_once():
    """MT-DAO's reason: after H steps elsewhere AdamW's momentum has forgotten what was common before."""
    common, noise = torch.ones(5, 3), [0.1 * (-1) ** at * torch.ones(5, 3) for at in range(32)]
    slow, fast = (
        ran(slow_momentum_step, replace(SLOW, beta1=beta1), [common] * 200 + noise)[1] for beta1 in (0.995, 0.9)
    )
    assert float(slow.mean()) > 0.5 > 0.1 > float(fast.mean().abs())
    before, after = (ran(slow_momentum_step, SLOW, [common] * count)[0] for count in (200, 201))
    turned = ran(slow_momentum_step, SLOW, [common] * 200 + [-9 * common])[0]
    assert float((before - after).mean()) > float((before - turned).mean())


def test_the_fixed_point_of_a_quadratic():
    """½‖x − t‖²: x ends at t, and t is left by nothing but the decay of weights."""
    spec, target = replace(SLOW, weight_decay=0.0), torch.full((5, 3), 0.3)
    value, first, second, steps = tensors()[0], torch.zeros(5, 3), torch.zeros(5, 3), torch.zeros(())
    for at in range(4000):
        rate = 1e-2 * (1 - at / 4000)
        slow_momentum_step([value], [value - target], [first], [second], [steps], spec, rate, 0.0)
    assert torch.allclose(value, target, atol=1e-2)
    still = target.clone()
    slow_momentum_step([still], [still - target], [first * 0], [second], [steps], spec, 1e-2, 0.0)
    assert torch.equal(still, target)


def test_a_saved_state_goes_on_with_the_same_bits():
    torch.set_num_threads(1)
    whole, part, resumed = (replica_of("dense", SLOW) for _ in range(3))
    list(run_steps(whole.inner.step, windows_of, 0, 8))
    list(run_steps(part.inner.step, windows_of, 0, 3))
    resumed.module.load_state_dict(part.module.state_dict())
    resumed.inner.load({name: value.clone() for name, value in part.inner.state().items()})
    list(run_steps(resumed.inner.step, lambda step: windows_of(step + 3), 3, 5))
    for atom, value in values_of(whole.inner).items():
        assert torch.equal(resumed.inner._atoms[atom], value), atom


def test_moments_of_an_honest_peer_keep_the_bound_that_strangers_are_checked_by():
    made = replica_of("mixture", SLOW)
    list(run_steps(made.inner.step, windows_of, 0, 6))
    names = [name for name in made.inner._atoms if ".experts.1." in name]
    shapes = [(name, tuple(made.inner._atoms[name].shape)) for name in names]
    state = made.inner.state()
    assert second_moment_bound(SLOW) > 0
    of_expert = {key for key in state if key.split("/", 1)[1] in names}
    assert unpack(pack(state, names), shapes, SLOW).keys() == of_expert


def golden():
    """Losses of twelve steps: the content of tests/golden/slow_momentum.json."""
    torch.set_num_threads(1)
    return {
        name: [round(loss, 4) for loss in run_steps(replica_of(name, SLOW).inner.step, windows_of, 0, 12)]
        for name in MODELS
    }


def test_golden_trajectory():
    """Up to the order of float sums, which machines choose."""
    recorded, found = json.loads(GOLDEN.read_text()), golden()
    assert recorded.keys() == found.keys()
    for name, losses in recorded.items():
        assert found[name] == pytest.approx(losses, abs=2e-4)
