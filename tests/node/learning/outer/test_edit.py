"""EDiT's penalty: weights against floats, anomalies, the clip of the mean, and rounds on a quadratic."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node.learning.compress.codecs import codec_of
from atoll.node.learning.compress.folding import OuterStep
from atoll.node.learning.outer.aggregation import Aggregation
from atoll.node.learning.outer.edit import anomalies, edit_weights, exponential, shorten_step
from atoll.node.learning.outer.fixed import plus, state_digest, to_float
from tests.node.learning.outer.conftest import pattern

torch.set_num_threads(1)
FAR = 1 << 200
ATOMS = np.array([0, 1, 1], np.int32)
GOLDEN = "1128df085ce4de3d3fdffe456eaf129ddc322aa8f52af336b327e377781f0647"
"""State digest after three rounds; changes only with the rule's arithmetic, which needs a new name."""


def norm2(length: float) -> int:
    return round(length * 2**26) ** 2


@given(st.lists(st.integers(0, 20 << 26), min_size=1, max_size=8))
def test_the_exponential_is_that_of_floats(excess):
    for x, found in zip(excess, exponential(np.array(excess, np.int64)).tolist(), strict=True):
        wanted = 2**31 * math.exp(-min(x, 16 << 26) / 2**26)
        assert abs(found - wanted) <= 1e-4 * wanted + 2**14


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 255), st.floats(2.0, 2.7)), min_size=1, max_size=9))
def test_weights_are_tokens_times_the_softmax_of_norms(drawn):
    """Lengths within 1.375 of the median: nobody is an anomaly."""
    found = edit_weights([weight for weight, _ in drawn], [norm2(length) for _, length in drawn])
    shares = [weight * math.exp(-length) for weight, length in drawn]
    assert max(found) == 255
    for each, share in zip(found, shares, strict=True):
        assert abs(each - 255 * share / max(shares)) <= 0.6


def test_one_far_above_the_others_counts_nothing_and_a_short_one_stays():
    lengths = [1.0, 1.1, 0.9, 1.05, 0.2, 4.0]
    found = edit_weights([64] * 6, [norm2(length) for length in lengths])
    assert found[5] == 0
    assert found[4] == 255
    assert all(found[:4])


@pytest.mark.parametrize("lengths", [[5], [1, 900], [7, 7, 7], [10, 10, 13], [0, 3, 0, 900]])
def test_few_members_or_those_that_agree_are_no_anomalies(lengths):
    assert not anomalies(np.array(lengths, np.int64)).any()


def test_who_sent_nothing_has_no_vote_and_nobody_is_no_error():
    assert edit_weights([9, 9, 9], [0, norm2(14.0), norm2(14.0)]) == [0, 255, 255]
    assert edit_weights([9, 255], [0, 0]) == [0, 0]


def test_where_lengths_are_large_the_shortest_has_all_of_the_vote():
    """As published, and why docs/aggregation.md calls it no defence."""
    assert edit_weights([64] * 4, [norm2(14.0), norm2(14.0), norm2(14.0), norm2(0.01)]) == [0, 0, 0, 255]


def test_the_longest_norms_do_not_overflow():
    assert edit_weights([255, 255], [1 << 90, (1 << 90) - 1]) == [255, 255]


# --- the clip of the mean --------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
def test_a_step_is_as_long_as_the_limit_in_each_atom(threads):
    theta = (pattern(3, 1) * 2**24).to(torch.int32)
    step = (pattern(3, 2) * 2**16).to(torch.int32)
    step[1:] //= 64
    moved = theta + step
    length = [float(step[rows].double().norm()) for rows in ([0], [1, 2])]
    limit = int(length[1]) + 1
    shorten_step(moved, theta, ATOMS, limit, threads)
    assert torch.equal(moved[1:], (theta + step)[1:]), "an atom below the limit has its bits"
    found = (moved - theta)[0].double()
    assert limit * (1 - 2e-3) < float(found.norm()) <= limit
    left = math.isqrt((limit * limit << 32) // int((step[0].long() ** 2).sum()))
    wanted = (step[0].long().abs() * left >> 16) * step[0].sign()
    assert torch.equal((moved - theta)[0].long(), wanted)


def test_the_largest_steps_do_not_overflow():
    theta, moved = torch.zeros((3, 4096), dtype=torch.int32), torch.full((3, 4096), 2**28, dtype=torch.int32)
    shorten_step(moved, theta, ATOMS, 64 << 20)
    assert int(moved[0, 0]) == 2**20
    assert torch.equal(moved[0], moved[0, :1].expand(4096))


# --- rounds ----------------------------------------------------------------------------------------


def next_theta(theta, deltas, step_most_256=2560, weights=None):
    """Θ after a round, as the worker computes it: judged, folded and clipped."""
    codec, nothing = codec_of("int8", 4096), torch.zeros((3, 4096))
    judge = Aggregation(None, 64, ATOMS, [FAR] * 2, 0, step_most_256=step_most_256)
    payloads = [codec.encode(delta.clone(), nothing, nothing, 1.0) for delta in deltas]
    given_P = weights or [64] * len(deltas)
    moved = codec.apply_update(theta, given_P, payloads, OuterStep(256, 64), judge=judge)
    judge.shorten(moved, theta, 256)
    return moved


def test_on_a_quadratic_theta_comes_to_the_least_point_in_spite_of_an_anomaly():
    """Three see a quadratic around the target, each with its noise; one sends what is fifty times as long."""
    target = pattern(3, 5) * 0.5
    theta = torch.zeros((3, 4096), dtype=torch.int32)
    for number in range(60):
        toward = (to_float(theta) - target) / 4
        deltas = [toward + pattern(3, 10 * number + at) * 1e-4 for at in range(3)]
        theta = next_theta(theta, [*deltas, -50 * deltas[0]])
    assert float((to_float(theta) - target).abs().max()) < 1e-3
    # The fixed point: contributions that are nothing are no step.
    assert torch.equal(next_theta(theta, [torch.zeros((3, 4096))] * 3), theta)


def test_a_mean_that_is_too_long_moves_as_far_as_the_limit():
    theta = torch.zeros((3, 4096), dtype=torch.int32)
    far = next_theta(theta, [pattern(3, at) for at in (1, 1, 1)], step_most_256=128)
    for rows in ([0], [1, 2]):
        assert float(to_float(far)[rows].double().norm()) == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize(("alpha_256", "count"), [(256, 1), (64, 3), (1024, 8)])
def test_a_mean_is_measured_wherever_it_can_be_too_long(alpha_256, count):
    """Equal members: the mean is each of them, and just longer than the limit."""
    codec, nothing = codec_of("int8", 4096), torch.zeros((3, 4096))
    theta, step = torch.zeros((3, 4096), dtype=torch.int32), OuterStep(alpha_256, 64)
    sent = codec.encode(torch.full((3, 4096), 0.01005), nothing, nothing, 1.0)
    length = float(to_float(codec.apply_update(theta, [64], [sent], OuterStep(256, 64)))[0].double().norm())
    for most_256 in (int(length * 256), int(length * 256) + 1):
        judge = Aggregation(None, 64, np.arange(3, dtype=np.int32), [FAR] * 3, 0, step_most_256=most_256)
        moved = codec.apply_update(theta, [64] * count, [sent] * count, step, judge=judge)
        plain = moved.clone()
        judge.shorten(moved, theta, alpha_256)
        assert torch.equal(moved, plain) == (most_256 > length * 256)
        found = float(to_float(moved)[0].double().norm())
        assert found <= most_256 / 256 * alpha_256 / 256


def test_the_golden_trajectory():
    theta = plus(torch.zeros((3, 4096), dtype=torch.int32), (pattern(3, 99) * 2**20).to(torch.int32))
    for number, (salts, weights) in enumerate([((0, 1), [9, 255]), ((2, 3, 4), [1, 2, 3]), ((5,), [64])]):
        deltas = [pattern(3, salt) ** 5 * (0.01 + 0.02 * at) for at, salt in enumerate(salts)]
        theta = next_theta(theta, deltas, 64 + number, weights)
    assert state_digest(theta).hex() == GOLDEN
