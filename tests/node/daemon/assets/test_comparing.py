"""A node whose own lease ended compares ledgers before it decides, and again after each refusal of its disk."""

import math

from atoll.node.daemon.assets.comparing import FRESH_S, Silence

LEASE_S = 60.0


def renewed(at: float) -> Silence:
    silence = Silence()
    silence.renew(at, LEASE_S)
    return silence


def test_who_had_a_lease_all_the_time_decides_at_once():
    silence = Silence()
    assert not silence.must_compare(1e6), "it has said nothing yet: its start compares"
    for now in (0.0, 20.0, 79.0):
        silence.renew(now, LEASE_S)
        assert not silence.must_compare(now + LEASE_S - 1)
    assert not silence.asked.is_set()


def test_a_lease_that_ended_is_not_forgotten_with_the_next_one():
    silence = renewed(10.0)
    silence.renew(75.0, LEASE_S)
    assert silence.must_compare(76.0)
    assert silence.asked.is_set()
    silence.end(80.0)
    assert silence.passed_s == 65.0
    assert not silence.must_compare(80.0 + FRESH_S), "it has a lease again"
    silence.end(90.0)
    assert silence.passed_s is None


def test_who_was_silent_for_a_moment_and_votes_minutes_later_was_silent_for_a_moment():
    silence = renewed(0.0)
    for now in range(61, 600, 20):
        silence.renew(float(now), LEASE_S)
    assert silence.must_compare(600.0)
    silence.end(601.0)
    assert silence.passed_s == 61.0


def test_one_comparison_is_asked_for_at_a_time():
    silence = renewed(0.0)
    assert silence.must_compare(LEASE_S)
    silence.asked.clear()  # it is under way
    assert silence.must_compare(LEASE_S + 1)
    assert not silence.asked.is_set()
    silence.forget()
    assert silence.must_compare(LEASE_S + 2)
    assert silence.asked.is_set()


def test_who_has_no_lease_yet_may_decide_for_a_while_unless_its_disk_refuses():
    silence = renewed(0.0)
    silence.must_compare(100.0)
    silence.end(101.0)
    assert not silence.must_compare(101.0 + FRESH_S / 2)
    silence.refuse()
    assert silence.must_compare(101.0 + FRESH_S / 2)
    silence.end(110.0)
    assert silence.passed_s == 110.0
    assert silence.must_compare(110.0 + FRESH_S), "what it heard then is old"
    assert not math.isinf(silence.passed_s)
