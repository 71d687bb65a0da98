"""Laws of how far a node runs ahead of a fold: enough not to wait, no more than that, and steady."""

from itertools import pairwise
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from atoll.node.daemon.rounds.overlap_depth import ENOUGH, REMEMBERED, SPARE, Ahead, begin, lag_of, measured

bounds = st.tuples(st.integers(0, 8), st.integers(0, 8)).map(lambda pair: (min(pair), max(pair)))
lags = st.floats(0, 50)


def after(ahead: Ahead, *lags: float) -> Ahead:
    for lag in lags:
        ahead = measured(ahead, lag)
    return ahead


@given(bounds, st.lists(lags, max_size=30))
def test_the_bounds_hold(bounds, lags):
    least, most = bounds
    ahead = begin(least, most)
    for lag in lags:
        ahead = measured(ahead, lag)
        assert least <= ahead.chosen <= most


@given(st.integers(0, 8), st.lists(lags, max_size=30))
def test_bounds_that_are_equal_leave_no_choice(steps, lags):
    assert after(begin(steps, steps), *lags).chosen == steps


@given(st.lists(lags, max_size=ENOUGH - 1))
def test_few_rounds_decide_nothing(lags):
    assert after(begin(1, 5), *lags).chosen == 5


@given(st.floats(0, 20))
def test_a_steady_link_is_given_what_it_needs_and_hardly_more(lag):
    ahead = after(begin(0, 30), *[lag] * REMEMBERED)
    assert lag <= ahead.chosen <= ceil(lag + SPARE)


def test_a_slow_link_gets_more_than_a_fast_one_and_follows_when_it_changes():
    fast, slow = after(begin(1, 5), *[0.3] * REMEMBERED), after(begin(1, 5), *[3.6] * REMEMBERED)
    assert (fast.chosen, slow.chosen) == (2, 5)
    assert after(fast, *[3.6] * REMEMBERED).chosen == 4
    assert after(slow, *[0.3] * REMEMBERED).chosen == 2


@given(st.floats(0, 20), st.lists(st.floats(0, 0.9), min_size=ENOUGH, max_size=60))
def test_jitter_of_less_than_a_step_does_not_make_it_flap(lag, jitter):
    ahead, seen = begin(0, 30), []
    for more in jitter:
        ahead = measured(ahead, lag + more)
        seen.append(ahead.chosen)
    seen = seen[ENOUGH - 1 :]
    assert sum(a != b for a, b in pairwise(seen)) <= 2
    assert all(a < b for a, b in pairwise(seen) if a != b) or seen[0] > seen[-1]


@given(st.floats(0, 20), st.lists(st.floats(0, 1e6), min_size=2, max_size=2), st.permutations(range(REMEMBERED)))
def test_two_disturbed_rounds_change_nothing(lag, odd, places):
    steady = after(begin(0, 30), *[lag] * REMEMBERED)
    rounds = [lag] * REMEMBERED
    for place, value in zip(places, odd, strict=False):
        rounds[place] = max(lag, value)
    assert after(steady, *rounds).chosen == steady.chosen


@given(st.integers(0, 5), st.floats(0, 100), st.floats(1e-3, 100), st.integers(1, 50))
def test_a_lag_is_the_steps_that_were_taken_and_those_that_were_not(overlapped, held_s, train_s, steps):
    lag = lag_of(overlapped, held_s, train_s, steps)
    assert lag >= overlapped
    assert abs((lag - overlapped) * train_s / steps - held_s) <= 1e-9 * (1 + held_s)
    assert lag_of(overlapped, 0.0, 0.0, steps) == overlapped
