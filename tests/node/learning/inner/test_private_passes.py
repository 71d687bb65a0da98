"""Private passes: no sequence moves the sum of a step by more than the clip, and the sum gets noise once."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from atoll.node.learning.inner.loop import Inner
from atoll.node.learning.inner.private_passes import BLOCK, Privacy, PrivatePasses, clip_factor, normals
from atoll.protocols.run.run_spec import InnerSpec

SPEC = InnerSpec(
    lr=0.05, lr_min=0.1, warmup_steps=1, total_steps=100, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1,
    clip=1.0, batch=4,
)  # fmt: skip


def drawn(seed):
    return np.random.default_rng(seed).bytes


def silent(count):
    raise AssertionError(f"{count} bytes were drawn")


class Line(nn.Module):
    """Predicts the last value of a window from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[0.5, -0.25, 0.125]]))
        self.bias = nn.Parameter(torch.zeros(1))
        self.seen = 0

    def forward(self, x_BT):
        self.seen = max(self.seen, len(x_BT))
        return x_BT @ self.weight.T + self.bias


def loss_of(module, window_BT1):
    value_BT1 = window_BT1.float()
    return ((module(value_BT1[:, :-1]) - value_BT1[:, -1:]) ** 2).mean()


def gradient(window_BT1, *, clip=1.0, noise=0.0, random=None, module=None):
    """The gradient of a step, of all parameters end to end."""
    module = module or Line()
    passes = PrivatePasses(module, loss_of, Privacy(clip, noise, random or drawn(1)))
    passes.run(window_BT1, lambda: None)
    return torch.cat([each.grad.flatten() for each in module.parameters()]).clone()


def clipped(window_BT1, clip):
    """The same by other means, in float64: each sequence's own gradient, cut to `clip`, and their mean."""
    module, total = Line().double(), torch.zeros(4, dtype=torch.float64)
    for window_T1 in window_BT1:
        value_T1 = window_T1.double()
        loss = (module.weight @ value_T1[:-1] + module.bias - value_T1[-1]) ** 2
        found = torch.cat([each.flatten() for each in torch.autograd.grad(loss.sum(), list(module.parameters()))])
        total += found * clip / max(clip, float(found.norm()))
    return total / len(window_BT1)


WINDOWS = torch.tensor([[1, 2, 3, 4], [100, -50, 3, 7], [0, 0, 0, 0], [2, 1, 0, 1]])


@pytest.mark.parametrize("clip", [0.01, 1.0, 50.0, 1e5])
def test_each_sequence_has_a_gradient_of_its_own_and_it_is_clipped(clip):
    assert torch.allclose(gradient(WINDOWS, clip=clip).double(), clipped(WINDOWS, clip), rtol=1e-3, atol=1e-7)


def test_one_sequence_passes_at_a_time():
    module = Line()
    gradient(WINDOWS, module=module)
    assert module.seen == 1


window = st.lists(st.integers(-300, 300), min_size=4, max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.lists(window, min_size=1, max_size=5), window, st.floats(1e-3, 1e3))
def test_one_sequence_more_moves_the_sum_of_a_step_by_at_most_the_clip(others, one, clip):
    """The law that ε rests on."""
    without, with_it = torch.tensor(others), torch.tensor([*others, one])
    sums = [gradient(step, clip=clip).double() * len(step) for step in (without, with_it)]
    assert float((sums[1] - sums[0]).norm()) <= clip * (1 + 1e-5)


@given(st.integers(0, 2**32), st.floats(-18, 16), st.integers(1, 40))
def test_no_rounding_leaves_a_gradient_longer_than_the_clip(seed, exponent, blocks):
    rng = np.random.default_rng(seed)
    gradient_N = torch.from_numpy((rng.standard_normal(blocks * BLOCK) * 10.0**exponent).astype(np.float32))
    factor = clip_factor(gradient_N, 1.0)
    norm = float(gradient_N.double().norm())
    assert float(factor.double()) * norm <= 1.0
    assert float(factor) >= 0.999 * min(1.0, 1.0 / norm)


def test_a_gradient_that_is_not_finite_gives_none_that_is():
    for wrong in (torch.inf, torch.nan):
        gradient_N = torch.zeros(BLOCK)
        gradient_N[3] = wrong
        assert not torch.isfinite(gradient_N * clip_factor(gradient_N, 1.0)).all()


# --- noise -----------------------------------------------------------------------------------------


def test_the_sum_of_a_step_gets_noise_once_whatever_its_sequences_are():
    counts = []

    def counting(count):
        counts.append(count)
        return drawn(3)(count)

    one, four = (gradient(step, noise=2.0, random=counting) for step in (WINDOWS[:1], WINDOWS))
    assert counts == [16, 16], "four values, four bytes each"
    noise = torch.from_numpy(normals(4, drawn(3))) * 2.0
    assert torch.allclose(one, gradient(WINDOWS[:1]) + noise, atol=1e-5)
    assert torch.allclose(four, gradient(WINDOWS) + noise / 4, atol=1e-5)


def test_noise_is_of_the_size_of_the_clip():
    for clip in (0.1, 10.0):
        noise = gradient(WINDOWS, clip=clip, noise=3.0) - gradient(WINDOWS, clip=clip)
        assert torch.allclose(noise * 4, torch.from_numpy(normals(4, drawn(1))) * 3.0 * clip, rtol=1e-3)


def test_each_step_has_its_own_noise():
    module = Line()
    passes = PrivatePasses(module, loss_of, Privacy(1.0, 1.0, drawn(1)))
    found = []
    for _ in range(2):
        passes.run(WINDOWS, lambda: None)
        found.append(module.weight.grad.clone())
    assert not torch.allclose(*found, atol=0.1)


def test_normal_values_are_normal():
    value_N = normals(400_001, drawn(5)).astype(np.float64)
    assert len(value_N) == 400_001
    assert abs(value_N.mean()) < 4 / np.sqrt(len(value_N))
    assert value_N.std() == pytest.approx(1.0, abs=0.005)
    assert (value_N**4).mean() == pytest.approx(3.0, abs=0.06)
    assert (np.abs(value_N) > 3).mean() == pytest.approx(0.0027, abs=4e-4)
    half = len(value_N) // 2
    assert abs(np.corrcoef(value_N[:half], value_N[half : 2 * half])[0, 1]) < 0.01


def test_the_ends_of_what_is_drawn_are_numbers():
    for byte in (b"\0", b"\xff"):
        value_N = normals(3, lambda count, byte=byte: byte * count)
        assert np.isfinite(value_N).all()
        assert np.abs(value_N).max() < 6.8


def test_steps_are_what_they_were():
    """Golden: three steps with the optimizer and given noise."""
    module = Line()
    inner = Inner(module, loss_of, SPEC, privacy=Privacy(1.0, 0.5, drawn(9)))
    losses = [inner.step(WINDOWS.numpy(), at) for at in range(3)]
    found = [*losses, *torch.cat([each.detach().flatten() for each in module.parameters()]).tolist()]
    assert found == pytest.approx(GOLDEN, rel=1e-4)


GOLDEN = [783.8047, 585.1396, 553.4589, 0.4477061, -0.09852314, 0.2689509, 0.1424755]


@pytest.mark.parametrize("uses", [1, 4])
def test_who_guesses_whether_a_sequence_was_used_is_right_as_often_as_epsilon_allows(uses):
    """The best guess by all steps together: μ = √uses / σ gives it an advantage of 2Φ(μ/2) − 1, and no more."""
    clip, sigma, trials, canary = 0.5, 1.5, 1200 // uses, torch.tensor([[90, -80, 70, 9]])
    along = gradient(canary, clip=clip) / clip
    rng = np.random.default_rng(11)
    seen = []
    for step in (WINDOWS[2:], torch.cat((WINDOWS[2:], canary))):
        passes = PrivatePasses(Line(), loss_of, Privacy(clip, sigma, rng.bytes))
        values = np.empty((trials, uses))
        for at in np.ndindex(values.shape):
            passes.run(step, lambda: None)
            values[at] = float(passes._gradient_N[:4] @ along) * len(step)
        seen.append(values.sum(1))
    middle = (seen[0].mean() + seen[1].mean()) / 2
    advantage = (seen[1] > middle).mean() - (seen[0] > middle).mean()
    best = math.erf(math.sqrt(uses) / sigma / 2 / math.sqrt(2))
    assert advantage == pytest.approx(best, abs=0.1)


def test_a_step_without_noise_draws_nothing_else():
    """What is not noise is the same in each repetition: nothing else is random."""
    assert torch.equal(gradient(WINDOWS, noise=1.0), gradient(WINDOWS, noise=1.0))
