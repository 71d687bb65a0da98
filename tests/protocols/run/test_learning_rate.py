"""The learning rate of each inner step: warm-up, cosine, or a stable rate that decays; golden values."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocols.run.learning_rate import learning_rate
from tests.node.learning.inner.test_inner import inner_spec

GOLDEN = {0: 1e-3, 9: 1e-2, 10: 1e-2, 69: 1e-2, 70: 1e-2, 71: 8.57697505292e-3, 80: 5.5e-3, 109: 1.11321205384e-3}
"""Step and rate of WSD: 10 steps of warm-up, 60 stable, 40 of decay to a tenth; 1 − √(1/40), 1 − √(1/4), …"""
FORTY = 103
"""256ths of the 100 steps after the warm-up that are 40 whole ones."""


def test_the_rate_rises_falls_and_stays():
    spec = inner_spec()
    rates = [learning_rate(spec, step) for step in range(200)]
    assert rates[0] == pytest.approx(1e-3)
    assert rates[9] == rates[10] == pytest.approx(1e-2)
    assert rates[60] == pytest.approx(1e-2 * (0.1 + 0.9 / 2))
    assert all(a > b for a, b in pairwise(rates[10:111]))
    assert rates[110:] == pytest.approx([1e-3] * 90)


def test_the_rate_without_warm_up_starts_at_the_peak():
    later = inner_spec(warmup_steps=10, total_steps=90, first_step=30)
    assert learning_rate(later, 5) == learning_rate(inner_spec(warmup_steps=10, total_steps=90), 35)
    assert learning_rate(inner_spec(warmup_steps=0), 0) == 1e-2
    assert learning_rate(inner_spec(warmup_steps=10, total_steps=5), 50) == pytest.approx(1e-3)


def test_golden_rates_of_a_decay():
    spec = inner_spec(decay_256=FORTY)
    assert spec.decay_steps == 40
    assert {step: learning_rate(spec, step) for step in GOLDEN} == pytest.approx(GOLDEN, rel=1e-11)
    assert [learning_rate(spec, step) for step in (110, 10**6)] == pytest.approx([1e-3, 1e-3])


def test_a_decay_of_no_steps_never_begins():
    spec = inner_spec(decay_256=0)
    assert {learning_rate(spec, step) for step in (10, 109, 110, 10**6)} == {1e-2}


def test_a_decay_that_begins_with_the_warm_ups_end_has_no_stable_rate():
    rates = [learning_rate(inner_spec(decay_256=256), step) for step in range(110)]
    assert rates[10] == 1e-2
    assert all(earlier > later for earlier, later in pairwise(rates[10:]))


def test_a_run_that_is_shorter_than_its_warm_up_has_no_decay():
    spec = inner_spec(warmup_steps=10, total_steps=6, decay_256=256)
    assert spec.decay_steps == 0
    assert learning_rate(spec, 5) == pytest.approx(6e-3)


@given(st.integers(0, 60), st.integers(0, 256), st.integers(0, 400), st.integers(0, 500))
def test_the_rate_of_a_decay_is_the_formula_everywhere(warmup, share_256, first, step):
    spec = inner_spec(warmup_steps=warmup, total_steps=200, decay_256=share_256, first_step=first)
    decay = (200 - warmup) * share_256 // 256
    at = first + step
    if at < warmup:
        expected = 1e-2 * (at + 1) / warmup
    elif share_256 and at > 200 - decay:
        expected = 1e-2 * (0.1 + 0.9 * (1 - math.sqrt(min(1.0, (at - 200 + decay) / max(1, decay)))))
    else:
        expected = 1e-2
    assert learning_rate(spec, step) == pytest.approx(expected)
