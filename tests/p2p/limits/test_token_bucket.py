"""The law of the bucket, and who gets its tokens."""

from collections import Counter
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.p2p.limits.token_bucket import BULK_SHARE, BURST_S, Bucket, FairBucket, Ticket, TrafficClass

RATES = st.floats(8e3, 1e9)
GAPS = st.lists(st.floats(0, 5), min_size=1, max_size=40)


@given(RATES, st.floats(1, 1e6), st.lists(st.tuples(st.floats(0, 5), st.floats(0, 2)), max_size=60))
def test_no_window_gets_more_than_its_rate_and_one_burst(
    rate: float, burst: float, wishes: list[tuple[float, float]]
) -> None:
    bucket, now_s, taken = Bucket(rate, burst, 0.0), 0.0, [(0.0, 0.0)]
    for gap_s, share in wishes:
        now_s += gap_s
        size = share * burst
        if bucket.take(size, now_s):
            taken.append((now_s, size))
        else:
            assert bucket.ready_s(size, now_s) >= now_s
    for first in range(len(taken)):
        total = 0.0
        for at_s, size in taken[first:]:
            total += size
            assert total <= rate * (at_s - taken[first][0]) + burst + 1e-6 * (burst + rate)


@given(RATES, st.floats(1, 1e6), st.floats(1e-6, 1))
def test_what_was_promised_is_there_in_time(rate: float, burst: float, share: float) -> None:
    bucket = Bucket(rate, burst, 0.0)
    assert bucket.take(burst, 0.0)
    ready_s = bucket.ready_s(share * burst, 0.0)
    assert ready_s <= share * burst / rate * (1 + 1e-9)
    assert bucket.level(ready_s) >= share * burst * (1 - 1e-9)


@given(GAPS)
def test_a_clock_that_goes_back_gives_nothing(gaps: list[float]) -> None:
    bucket = Bucket(100.0, 50.0, 10.0)
    bucket.take(50.0, 10.0)
    for gap_s in gaps:
        assert bucket.level(10.0 - gap_s) == 0.0


def drive(bucket: FairBucket, wishes: dict[str, TrafficClass], seconds: float) -> list[tuple[float, Ticket]]:
    """Everybody always wants one more piece."""
    granted: list[tuple[float, Ticket]] = []
    for peer, traffic in wishes.items():
        bucket.ask(peer, traffic, bucket.piece_bytes)
    now_s = 0.0
    while now_s < seconds:
        for ticket in bucket.grant(now_s):
            granted.append((now_s, ticket))
            bucket.ask(ticket.peer, ticket.traffic, bucket.piece_bytes)
        next_s = bucket.next_s(now_s)
        assert next_s is not None
        now_s = max(next_s, now_s + 1e-6)
    return granted


@settings(max_examples=20, deadline=None)
@given(st.floats(8e3, 1e6))
def test_bulk_is_paced_to_its_share(rate: float) -> None:
    bucket = FairBucket(rate, 0.0)
    total = sum(ticket.size_bytes for _, ticket in drive(bucket, {"a": TrafficClass.BULK}, 10.0))
    burst = max(2048, rate * BURST_S)
    assert 0.97 * BULK_SHARE * rate * 10 <= total <= BULK_SHARE * rate * 10 + burst


def test_control_is_served_before_bulk_and_may_use_all() -> None:
    bucket = FairBucket(1e6, 0.0)
    for _ in range(100):
        bucket.ask("a", TrafficClass.BULK, 10_000)
    bucket.grant(0.0)
    control = [bucket.ask("b", TrafficClass.CONTROL, 10_000) for _ in range(200)]
    first = bucket.grant(1.0)
    assert {ticket.traffic for ticket in first} == {TrafficClass.CONTROL}
    now_s = 1.0
    while not control[-1].is_granted:
        now_s = bucket.next_s(now_s) or now_s
        assert {ticket.traffic for ticket in bucket.grant(now_s)} <= {TrafficClass.CONTROL}
        now_s += 1e-6
    assert now_s < 1.0 + 2e6 / 1e6, "the whole rate, not the share of bulk"


def test_peers_share_equally_however_many_streams_they_have() -> None:
    bucket = FairBucket(1e6, 0.0)
    got: Counter[str] = Counter()
    for _ in range(7):
        bucket.ask("greedy", TrafficClass.BULK, bucket.piece_bytes)
    wishes = {"modest": TrafficClass.BULK, "third": TrafficClass.BULK}
    for at_s, ticket in drive(bucket, wishes, 20.0):
        if at_s > 2:
            got[str(ticket.peer)] += round(ticket.size_bytes)
    assert max(got.values()) < 1.1 * min(got.values())


def test_small_wishes_do_not_cost_a_turn() -> None:
    bucket = FairBucket(1e5, 0.0)
    got: Counter[str] = Counter()
    sizes = {"small": 100, "large": 6000}
    for peer, size in sizes.items():
        bucket.ask(peer, TrafficClass.BULK, size)
    now_s = 0.0
    while now_s < 20:
        for ticket in bucket.grant(now_s):
            got[str(ticket.peer)] += round(ticket.size_bytes)
            bucket.ask(ticket.peer, TrafficClass.BULK, sizes[str(ticket.peer)])
        now_s = max(bucket.next_s(now_s) or 0.0, now_s + 1e-6)
    assert max(got.values()) < 1.1 * min(got.values())


def test_who_was_away_does_not_save_up_turns() -> None:
    bucket = FairBucket(1e6, 0.0)
    drive(bucket, {"a": TrafficClass.BULK}, 10.0)
    for _ in range(20):
        bucket.ask("late", TrafficClass.BULK, bucket.piece_bytes)
        bucket.ask("a", TrafficClass.BULK, bucket.piece_bytes)
    order = [ticket.peer for at in range(1000, 2000) for ticket in bucket.grant(at / 10)][:20]
    assert 8 <= order.count("late") <= 12
    assert all(set(pair) == {"a", "late"} for pair in pairwise(order[2:]))


def test_dropped_wishes_take_nothing() -> None:
    bucket = FairBucket(1e5, 0.0)
    tickets = [bucket.ask("a", TrafficClass.BULK, bucket.piece_bytes) for _ in range(50)]
    bucket.grant(0.0)
    for ticket in tickets:
        bucket.drop(ticket)
        bucket.drop(ticket)
    assert bucket.next_s(0.0) is None
    assert bucket.grant(100.0) == []
