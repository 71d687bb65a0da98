"""SIGReg against the closed form of its statistic, against differences, in parts, and where its descent ends."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node.learning.objectives.sigreg import SigReg

CPU = torch.device("cpu")
N, D, M = 192, 8, 16


def hidden(seed=1, count=N, scale=1.0):
    return torch.randn(count, D, generator=torch.Generator().manual_seed(seed)) * scale


def term_of(seed=3, tokens=N, count=M):
    made = SigReg(D, tokens, {"directions": float(count)})
    made.begin(seed, CPU)
    return made


def alone(means):
    return means


def closed_form(z_N):
    """N ∫ |φ − e^{−t²/2}|² e^{−t²/2} dt over all t, by the Fourier transform of a Gaussian (Epps, Pulley 1983)."""
    pairs = np.exp(-((z_N[:, None] - z_N[None]) ** 2) / 2).mean()
    cross = np.exp(-(z_N**2) / 4).mean() * math.sqrt(2)
    return len(z_N) * math.sqrt(2 * math.pi) * (pairs - cross + 1 / math.sqrt(3))


@pytest.mark.parametrize("scale", [0.2, 0.7, 1.0, 1.4])
def test_the_value_is_the_closed_form_of_the_statistic(scale):
    """Beyond ±5 the rule of 17 points sees distances of 10 as none, so samples are narrow enough here."""
    made, x_ND = term_of(), hidden(scale=scale)
    z_NM = (x_ND @ made._directions_DM).double().numpy()
    assert float(made.term(x_ND, alone)) == pytest.approx(np.mean([closed_form(z_N) for z_N in z_NM.T]), rel=2e-3)


def test_directions_are_unit_vectors_of_the_step():
    made, again, other = term_of(), term_of(), term_of(seed=4)
    assert made._directions_DM.shape == (D, M)
    assert torch.allclose(made._directions_DM.norm(dim=0), torch.ones(M), atol=1e-6)
    assert torch.equal(made._directions_DM, again._directions_DM)
    assert not torch.equal(made._directions_DM, other._directions_DM)


def test_of_gaussian_samples_it_is_what_chance_gives_and_of_others_it_grows_with_their_number():
    """E[N·|φ − g|²] = 1 − g² of N independent samples: ∫ (1 − e^{−t²}) e^{−t²/2} dt = √2π·(1 − 1/√3)."""
    chance = math.sqrt(2 * math.pi) * (1 - 1 / math.sqrt(3))
    for count in (256, 2048):
        made = term_of(tokens=count, count=64)
        found = np.mean([float(made.term(hidden(seed, count), alone)) for seed in range(40)])
        assert found == pytest.approx(chance, rel=0.15)
        assert float(made.term(hidden(1, count, 0.5), alone)) > 0.02 * count
        assert float(made.term(torch.ones(count, D), alone)) > 0.1 * count


def test_the_gradient_is_that_of_differences():
    made, x_ND = term_of(), hidden().requires_grad_()
    made.term(x_ND, alone).backward()
    double = x_ND.detach().clone()
    for at in ((0, 0), (17, 3), (N - 1, D - 1)):
        step = torch.zeros_like(double)
        step[at] = 0.05
        slope = (float(made.term(double + step, alone)) - float(made.term(double - step, alone))) / 0.1
        assert float(x_ND.grad[at]) == pytest.approx(slope, rel=2e-2, abs=1e-5)


def test_samples_that_follow_its_gradient_become_standard_normal():
    x_ND = (hidden() * 0.3 + 1.5).requires_grad_()
    optimizer = torch.optim.Adam([x_ND], lr=0.05)
    made = SigReg(D, N, {"directions": 64.0})
    before = after = 0.0
    for step in range(300):
        made.begin(step, CPU)
        optimizer.zero_grad()
        loss = made.term(x_ND, alone)
        loss.backward()
        optimizer.step()
        before, after = before or loss.item(), loss.item()
    assert after < 0.01 * before
    x_ND = x_ND.detach()
    assert float(x_ND.mean(0).abs().max()) < 0.15
    assert torch.allclose(x_ND.T.cov(), torch.eye(D), atol=0.3)


@settings(deadline=None, max_examples=25)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5), seed=st.integers(0, 9))
def test_parts_of_a_step_have_its_value_and_its_gradient(sizes, seed):
    made, x_ND = term_of(), hidden(seed, sum(sizes))
    whole, cut = x_ND.clone().requires_grad_(), x_ND.clone().requires_grad_()
    value = made.term(whole, alone)
    value.backward()
    parts = cut.split(sizes)
    mean = sum(made.means(part.detach()) * (len(part) / len(cut)) for part in parts)
    loss = sum(made.term(part, lambda _: mean) * (len(part) / len(cut)) for part in parts)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(value.detach()), rel=1e-4)
    assert torch.allclose(cut.grad, whole.grad, atol=1e-5 * float(whole.grad.abs().max()) + 1e-7)


def test_its_share_of_a_step_does_not_depend_on_how_many_sequences_a_slow_member_takes():
    """N is the run's, so the same states give the same term, whatever part of a step they are."""
    made, x_ND = term_of(tokens=4 * N), hidden()
    assert float(made.term(x_ND, alone)) == pytest.approx(4 * float(term_of().term(x_ND, alone)), rel=1e-5)


def test_without_a_setting_there_are_1024_directions():
    made = SigReg(D, N, {})
    made.begin(1, CPU)
    assert made._directions_DM.shape == (D, 1024)
