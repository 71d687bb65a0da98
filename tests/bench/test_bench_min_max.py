"""Compressed extra-gradient: linear rates where compressed descent-ascent diverges; and what is compressed."""

import itertools

import numpy as np
import pytest
import torch

from atoll_bench.min_max.masha import Rest, distances, methods, random_values, solved
from atoll_bench.min_max.problems import Bilinear, RobustRegression

torch.set_num_threads(1)
STEPS, EVERY = 300, 60


def test_the_bilinear_solution_is_where_the_mean_of_the_operators_is_zero():
    problem = Bilinear(3, 64, 0.03, 1)
    mean = sum(problem.operator(member, problem.solution()) for member in range(3))
    assert abs(mean).max() < 1e-9
    step = np.random.default_rng(2).normal(size=128)
    difference = problem.operator(0, step) - problem.operator(0, 0 * step)
    assert difference @ step == pytest.approx(0.03 * step @ step), "a rotation, and the pull"


@pytest.mark.parametrize("method", ["masha1", "masha2"])
def test_masha_comes_nearer_by_a_factor_where_descent_ascent_diverges(method):
    problem = Bilinear(3, 2048, 0.03, 1)
    found = distances(methods(problem, STEPS)[method], problem.solution(), EVERY)
    assert all(after < 0.97 * before for before, after in itertools.pairwise(found))
    plain = distances(methods(problem, STEPS)["descent-ascent"], problem.solution(), EVERY)
    assert plain[-1] > max(2.0, plain[1])


def test_an_adversary_that_moves_the_inputs_is_answered():
    problem = RobustRegression(3, 64, 128, 1)
    solution = solved(problem, 1500)
    assert abs(sum(problem.operator(member, solution) for member in range(3))).max() < 1e-6
    for method in ("masha1", "masha2"):
        assert distances(methods(problem, STEPS)[method], solution, STEPS)[-1] < 0.05


def test_random_values_are_unbiased_and_what_is_not_sent_is_kept():
    rng, values = np.random.default_rng(1), np.random.default_rng(2).normal(size=64)
    mean = np.mean([random_values(values, 1024, rng) for _ in range(4000)], 0)
    assert abs(mean - values).max() < 6 * abs(values).max() * (3 / 4000) ** 0.5
    rest = Rest(64, 1024)
    arrived = [rest(values), rest(0 * values)]
    assert np.linalg.norm(values - arrived[0]) < 0.9 * np.linalg.norm(values), "contractive"
    assert np.linalg.norm(values - sum(arrived)) < np.linalg.norm(values - arrived[0])
