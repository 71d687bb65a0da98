"""Silent downloads share few places for a moment each; the fastest is left alone, unless it is slow."""

from atoll.node.daemon.snapshots.offers import Trust
from atoll.node.daemon.snapshots.turns import (
    ALONE_S,
    AT_ONCE,
    FIRST_S,
    SOON_S,
    STAGGER_S,
    Running,
    fastest,
    gives_way,
    may_begin,
)


def run(age_s, moved=0, *, left=1000, trust=Trust.WORKED, failures=0):
    return Running(trust=trust, age_s=age_s, moved_bytes=moved, left_bytes=left, failures=failures)


def test_another_begins_a_moment_after_a_silent_one_and_not_beside_one_that_will_soon_be_over():
    assert may_begin(Trust.WORKED, [])
    assert not may_begin(Trust.WORKED, [run(STAGGER_S / 2)])
    assert may_begin(Trust.WORKED, [run(STAGGER_S)])
    assert not may_begin(Trust.WORKED, [run(STAGGER_S, 100)])
    assert not may_begin(Trust.WORKED, [run(9.0)] * AT_ONCE)


def test_one_stranger_at_a_time():
    assert may_begin(Trust.UNKNOWN, [])
    assert not may_begin(Trust.UNKNOWN, [run(STAGGER_S)])
    assert may_begin(Trust.UNKNOWN, [run(FIRST_S)])
    assert not may_begin(Trust.UNKNOWN, [run(FIRST_S, trust=Trust.UNKNOWN)])
    assert may_begin(Trust.WORKED, [run(STAGGER_S, trust=Trust.UNKNOWN)])


def test_a_silent_one_gives_way_when_its_time_is_over_and_others_wait():
    one = run(FIRST_S)
    assert gives_way(one, [one], is_awaited=True)
    assert not gives_way(one, [one], is_awaited=False)
    assert not gives_way(run(FIRST_S - 0.1), [one], is_awaited=True)
    again = run(FIRST_S, failures=1)
    assert not gives_way(again, [again], is_awaited=True), "it has twice as long"
    assert gives_way(run(2 * FIRST_S, failures=1), [again], is_awaited=True)


def test_the_fastest_goes_on_and_the_others_give_way():
    slow, fast = run(FIRST_S, 10), run(FIRST_S, 1000)
    assert fastest([slow, fast]) is fast
    assert gives_way(slow, [slow, fast], is_awaited=False)
    assert not gives_way(fast, [slow, fast], is_awaited=True)


def test_a_slow_one_is_compared_with_others_now_and_then():
    period_s = FIRST_S + ALONE_S
    begins = [may_begin(Trust.WORKED, [run(float(age_s), 1, left=10**9)]) for age_s in range(1, 200)]
    compared = [age_s for age_s, begin in enumerate(begins, 1) if begin]
    assert compared == [age_s for age_s in range(1, 200) if age_s % period_s < FIRST_S]


def test_one_that_sends_all_but_the_last_bytes_is_not_alone_for_ever():
    nearly = 10**9
    assert not may_begin(Trust.WORKED, [run(SOON_S, nearly, left=1)])
    assert may_begin(Trust.WORKED, [run(4 * (FIRST_S + ALONE_S), nearly, left=1)])


def test_the_start_comes_last_and_holds_nothing_back():
    start = run(50.0, 1000, trust=Trust.START)
    assert may_begin(Trust.WORKED, [start])
    assert not may_begin(Trust.START, [run(50.0)])
    assert not gives_way(start, [start, run(9.0, 9)], is_awaited=True)


def test_k_silent_offers_cost_a_second_each():
    """Whatever their order, the last of them begins after STAGGER_S for each, and FIRST_S."""
    for lies in (1, 2, 10, 100):
        began, waiting, now = [], lies + 1, 0.0
        while waiting:
            running = [run(now - at) for at in began]
            began = [
                at
                for at, seen in zip(began, running, strict=True)
                if not gives_way(seen, running, is_awaited=True)
            ]
            if may_begin(Trust.WORKED, [run(now - at) for at in began]):
                began.append(now)
                waiting -= 1
            now += 0.25
        assert now <= (lies + 1) * STAGGER_S + FIRST_S
