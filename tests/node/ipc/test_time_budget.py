"""What takes a small share of the time."""

import math

from atoll.node.ipc.time_budget import TimeBudget


def test_it_takes_its_share_and_no_more():
    allowance, now, spent_s = TimeBudget(0.02), 0.0, 0.0
    for _ in range(10_000):
        now += 0.5
        if allowance.is_due(now):
            now, spent_s = now + 0.1, spent_s + 0.1
            allowance.took(now, 0.1)
    assert 0.018 <= spent_s / now <= 0.0201


def test_none_is_due_while_one_is_under_way():
    allowance = TimeBudget(0.5)
    allowance.asked()
    assert not allowance.is_due(1e12)


def test_without_a_bound_it_is_always_due():
    allowance = TimeBudget(math.inf)
    allowance.took(5.0, 3.0)
    assert allowance.is_due(5.0)
