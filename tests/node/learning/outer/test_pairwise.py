"""Pairwise gossip: two members of equal lengths keep their mean, and nobody's difference grows."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node.learning.outer.pairwise import mixed, share_of

LAWS = settings(max_examples=50, deadline=None)


def rows(seed, size=1.0):
    return torch.randn((2, 4096), generator=torch.Generator().manual_seed(seed)) * size


def square(values):
    return float(values.double().square().sum())


@LAWS
@given(st.integers(0, 99), st.integers(0, 99), st.floats(1e-3, 1e6))
def test_no_neighbour_makes_a_difference_longer(seed, other, loud):
    anchor, own, theirs = rows(7), rows(seed), rows(other, loud)
    after = anchor - mixed(anchor - own, anchor, theirs, share_of(square(own), square(theirs)))
    assert square(after) <= square(own) * (1 + 1e-4)


@LAWS
@given(st.integers(0, 99), st.integers(0, 99))
def test_both_sides_together_keep_the_mean_of_equally_long_differences(seed, other):
    anchor, one, two = rows(7), rows(seed), rows(other)
    two = two * math.sqrt(square(one) / square(two))
    share = share_of(square(one), square(two))
    assert share == pytest.approx(1, rel=1e-6)
    after = [mixed(anchor - each, anchor, theirs, 1.0) for each, theirs in ((one, two), (two, one))]
    assert torch.allclose(after[0] + after[1], 2 * anchor - one - two, atol=1e-5)
    assert torch.allclose(after[0], after[1], atol=1e-5)


@pytest.mark.parametrize(
    ("own", "theirs", "share"),
    [(4.0, 1.0, 1.0), (1.0, 4.0, 0.5), (0.0, 1.0, 0.0), (0.0, 0.0, 0.0), (1.0, 0.0, 1.0), (1.0, math.inf, 0.0)],
)
def test_the_share_of_a_neighbour(own, theirs, share):
    assert share_of(own, theirs) == share
    assert share_of(math.nan, theirs) == share_of(own, math.nan) == 0
