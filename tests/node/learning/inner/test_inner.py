"""The inner optimiser: schedule, AdamW against its formula, the same bits, saved state, evaluation."""

import math
import weakref

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.nn import functional

from atoll.node.learning.inner.evaluate import evaluate
from atoll.node.learning.inner.loop import Inner
from atoll.protocols.errors import CorruptFault, Divergence
from atoll.protocols.run.learning_rate import learning_rate
from atoll.protocols.run.run_spec import InnerSpec
from atoll_bench.inner_steps import run_steps


def inner_spec(**changes):
    base = {
        "lr": 1e-2, "lr_min": 0.1, "warmup_steps": 10, "total_steps": 110, "beta1": 0.9, "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1, "clip": 1.0, "batch": 4,
    }  # fmt: skip
    return InnerSpec(**{**base, **changes})


class Toy(nn.Module):
    """Next token from this token: a table and a gain."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.table = nn.Parameter(torch.randn(16, 16, generator=generator) * 0.1)
        self.gain = nn.Parameter(torch.ones(16))

    def forward(self, tokens):
        return self.table[tokens] * self.gain


def loss_of(module, window):
    return functional.cross_entropy(module(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


def batch_of(step):
    return np.random.default_rng(step).integers(0, 4, (4, 9))


def bits(module):
    return b"".join(p.detach().numpy().tobytes() for p in module.parameters())


def test_steps_follow_the_formula_of_adamw_with_clipping():
    torch.set_num_threads(1)
    spec = inner_spec(clip=0.05)
    inner, plain = Inner(Toy(), loss_of, spec), Toy()
    first = [torch.zeros_like(p) for p in plain.parameters()]
    second = [torch.zeros_like(p) for p in plain.parameters()]
    for step in range(12):
        inner.step(batch_of(step), step)
        grads = torch.autograd.grad(loss_of(plain, torch.from_numpy(batch_of(step))), list(plain.parameters()))
        norm = math.sqrt(sum(float((g**2).sum()) for g in grads))
        assert norm > spec.clip, "the test must clip"
        rate = learning_rate(spec, step)
        with torch.no_grad():
            for at, (p, g) in enumerate(zip(plain.parameters(), grads, strict=True)):
                g = g * min(1, spec.clip / (norm + 1e-6))
                first[at] = spec.beta1 * first[at] + (1 - spec.beta1) * g
                second[at] = spec.beta2 * second[at] + (1 - spec.beta2) * g**2
                up = first[at] / (1 - spec.beta1 ** (step + 1))
                down = (second[at] / (1 - spec.beta2 ** (step + 1))).sqrt() + spec.eps
                decay = spec.weight_decay if p.dim() > 1 else 0.0
                p.mul_(1 - rate * decay).sub_(rate * up / down)
    for mine, theirs in zip(inner.module.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=2e-6)


def test_the_same_start_gives_the_same_bits_however_the_steps_are_cut():
    a, b = Inner(Toy(), loss_of, inner_spec()), Inner(Toy(), loss_of, inner_spec())
    losses = list(run_steps(a.step, batch_of, 0, 20))
    again = list(run_steps(b.step, batch_of, 0, 7))
    again += list(run_steps(b.step, lambda i: batch_of(7 + i), 7, 13))
    assert losses == again
    assert bits(a.module) == bits(b.module)


def test_the_generator_may_be_left_between_two_steps():
    inner, other = Inner(Toy(), loss_of, inner_spec()), Inner(Toy(), loss_of, inner_spec())
    steps = run_steps(inner.step, batch_of, 0, 20)
    next(steps), next(steps)
    steps.close()
    list(run_steps(other.step, batch_of, 0, 2))
    assert bits(inner.module) == bits(other.module)


def test_it_learns():
    inner = Inner(Toy(), loss_of, inner_spec(total_steps=300, lr=0.05))
    losses = list(run_steps(inner.step, batch_of, 0, 150))
    assert losses[0] > 2.6
    assert losses[-1] < math.log(4) + 0.15


def test_a_saved_state_goes_on_with_the_same_bits():
    whole, part = Inner(Toy(), loss_of, inner_spec()), Inner(Toy(), loss_of, inner_spec())
    list(run_steps(whole.step, batch_of, 0, 10))
    list(run_steps(part.step, batch_of, 0, 5))
    saved = {name: tensor.clone() for name, tensor in part.state().items()}
    resumed = Inner(Toy(), loss_of, inner_spec())
    resumed.module.load_state_dict(part.module.state_dict())
    resumed.load(saved)
    list(run_steps(resumed.step, lambda i: batch_of(5 + i), 5, 5))
    assert bits(resumed.module) == bits(whole.module)
    kinds = ("step", "exp_avg", "exp_avg_sq")
    assert set(saved) == {f"{kind}/{name}" for kind in kinds for name in ("table", "gain")}


def test_a_fresh_state_loads_and_forgets():
    inner, fresh = Inner(Toy(), loss_of, inner_spec()), Inner(Toy(), loss_of, inner_spec())
    inner.step(batch_of(0), 0)
    inner.load(fresh.state())
    assert inner.state() == {}


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_an_atom_that_comes_late_moves_like_one_in_its_first_step(beta2):
    """By the rate, whatever the gradient: with the others' step count it would be 0.45 of it, or 3.2 of it."""
    spec = inner_spec(beta2=beta2, weight_decay=0.0, lr=1e-4, lr_min=1.0, warmup_steps=0)
    inner = Inner(Toy(), loss_of, spec)
    list(run_steps(inner.step, batch_of, 0, 500))
    saved = {name: tensor.clone() for name, tensor in inner.state().items() if not name.endswith("/table")}
    inner.load(saved)
    before = inner.module.table.detach().clone()
    inner.step(batch_of(500), 500)
    used = inner.module.table.grad.abs() > 1e-6
    moved = (inner.module.table.detach() - before).abs()[used]
    assert used.any()
    assert moved.max() <= 1e-4 * 1.001
    assert moved.min() >= 1e-4 * 0.98
    assert inner.state()["step/table"].tolist() == [1.0]
    assert inner.state()["step/gain"].tolist() == [501.0]


def test_experts_move_by_their_own_rate():
    """In the first step every weight with a gradient moves by its rate."""
    spec = inner_spec(weight_decay=0.0, lr=1e-4, lr_min=1.0, warmup_steps=0)
    names = {"table": "model.layers.0.mlp.experts.3.up_proj.weight", "gain": "model.norm.weight"}

    def by_atom(tensors):
        return {names[name]: tensor for name, tensor in tensors.items()}

    quick, same = (
        Inner(Toy(), loss_of, changed, by_atom=by_atom) for changed in (replace(spec, expert_lr=2.0), spec)
    )
    for inner, rate in ((quick, 2e-4), (same, 1e-4)):
        before = inner.module.table.detach().clone()
        inner.step(batch_of(0), 0)
        used = inner.module.table.grad.abs() > 1e-6
        moved = (inner.module.table.detach() - before).abs()[used]
        assert used.any()
        assert rate * 0.98 <= moved.min() <= moved.max() <= rate * 1.001
    assert torch.equal(quick.module.gain, same.module.gain)


def test_a_step_leaves_no_second_hold_on_the_gradients():
    inner = Inner(Toy(), loss_of, inner_spec())
    inner.step(batch_of(0), 0)
    held = [weakref.ref(p.grad) for p in inner.module.parameters()]
    inner.module.zero_grad()
    assert all(gradient() is None for gradient in held), "they would live through the next way back"


def test_loading_does_not_share_memory():
    inner, other = Inner(Toy(), loss_of, inner_spec()), Inner(Toy(), loss_of, inner_spec())
    inner.step(batch_of(0), 0)
    saved = inner.state()
    other.load(saved)
    before = saved["exp_avg/table"].clone()
    other.step(batch_of(1), 1)
    assert torch.equal(saved["exp_avg/table"], before)


@pytest.mark.parametrize("spoil", ["step/table", "exp_avg/gain", "exp_avg_sq/table", "shape", "step"])
def test_another_models_state_is_refused(spoil):
    inner = Inner(Toy(), loss_of, inner_spec())
    inner.step(batch_of(0), 0)
    saved = inner.state()
    if spoil == "shape":
        saved["exp_avg_sq/table"] = torch.zeros(3, 3)
    elif spoil == "step":
        saved["step/gain"] = torch.zeros(2)
    else:
        del saved[spoil]
    with pytest.raises(CorruptFault, match="does not fit"):
        inner.load(saved)


def test_a_loss_that_is_not_finite_changes_nothing():
    module = Toy()
    inner = Inner(module, lambda m, w: loss_of(m, w) * float("nan"), inner_spec())
    before = bits(module)
    with pytest.raises(Divergence) as caught:
        inner.step(batch_of(0), 0)
    assert bits(module) == before
    assert caught.value.hint


def test_evaluation_of_a_uniform_model_is_log_of_the_vocabulary():
    module = Toy()
    with torch.no_grad():
        module.table.zero_()
    windows = np.random.default_rng(0).integers(0, 16, (37, 9))
    found = evaluate(module, loss_of, windows, 37 * 8 * 2)
    assert found.val_loss == pytest.approx(math.log(16), abs=1e-6)
    assert found.val_bpb == pytest.approx(2.0, abs=1e-6), "4 bits per token of two bytes"


def test_evaluation_weighs_all_windows_alike_and_leaves_the_model_alone():
    module = Toy()
    windows = np.random.default_rng(0).integers(0, 16, (37, 9))
    before = bits(module)
    found = evaluate(module, loss_of, windows, 37 * 8)
    assert found.val_loss == pytest.approx(float(loss_of(module, torch.from_numpy(windows)).detach()), rel=1e-5)
    assert bits(module) == before
    assert all(p.grad is None for p in module.parameters())
