"""Which chunk from whom: laws of the plan, on times that the test makes."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.p2p.blobs.chunk_schedule import (
    FIRST_WINDOW,
    SLOW_AFTER_S,
    ChunkSchedule,
    FlowWindow,
    first_from,
    rarest,
)
from atoll.p2p.blobs.frames import WINDOW, pack_bits, unpack_bits
from atoll.protocols.ids import PeerId

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
MIB = 1 << 20
BITS = st.integers(0, (1 << 40) - 1)


@given(BITS, st.lists(BITS, max_size=9))
def test_the_rarest_are_those_that_the_fewest_have(candidates: int, others: list[int]) -> None:
    counts = {i: sum(have >> i & 1 for have in others) for i in range(40) if candidates >> i & 1}
    lowest = min(counts.values(), default=0)
    assert rarest(candidates, others) == sum(1 << i for i, count in counts.items() if count == lowest)


@given(BITS.filter(bool), st.integers(0, 50))
def test_equals_are_taken_from_a_place_of_our_own(bits: int, start: int) -> None:
    index = first_from(bits, start)
    assert bits >> index & 1
    order = sorted((i for i in range(40) if bits >> i & 1), key=lambda i: (i < start, i))
    assert index == order[0]


@given(st.integers(0, 50), st.data())
def test_bitmaps_come_back(chunks: int, data: st.DataObject) -> None:
    bits = data.draw(st.integers(0, (1 << chunks) - 1))
    assert unpack_bits(pack_bits(bits, chunks), chunks) == bits
    assert unpack_bits(b"\xff" * 20, chunks) == unpack_bits(b"", chunks) == (1 << chunks) - 1


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 5), st.integers(0, 1 << 32))
def test_every_chunk_arrives_and_is_asked_for_once_until_the_end(chunks: int, holders: int, seed: int) -> None:
    luck = random.Random(seed)
    everything = (1 << chunks) - 1
    plan, now_s = ChunkSchedule(everything, luck.randrange(chunks)), 0.0
    peers = [PeerId(str(number)) for number in range(holders)]
    for number, peer in enumerate(peers):
        plan.join(peer, everything if number == 0 else luck.getrandbits(chunks), FlowWindow(0.0))
    flights: list[tuple[PeerId, int]] = []
    came: list[int] = []
    while plan.missing:
        for peer in peers:
            while (index := plan.next(peer, now_s)) is not None:
                twice = [other for other, flying in flights if flying == index]
                assert (peer, index) not in flights
                assert len(twice) <= 1
                assert not twice or not any(other == peer for other, _ in flights), "the end game is for the idle"
                plan.ask(peer, index, now_s)
                flights.append((peer, index))
            assert plan.in_flight(peer) <= WINDOW
        assert flights
        now_s += luck.random()
        peer, index = flights.pop(luck.randrange(len(flights)))
        plan.received(peer, index)
        if luck.random() < 0.9:
            plan.verified(index)
            came.append(index)
        elif peer != peers[0]:
            plan.leave(peer)
            peers.remove(peer)
            flights = [flight for flight in flights if flight[0] != peer]
        else:
            plan.leave(peer)
            flights = [flight for flight in flights if flight[0] != peer]
            plan.join(peer, everything, FlowWindow(now_s))
        for other in peers:
            stale = plan.stale(other)
            assert all(not plan.missing >> index & 1 for index in stale)
            flights = [flight for flight in flights if flight[0] != other or flight[1] not in stale]
    assert sorted(set(came)) == list(range(chunks))


def fed(rate_bytes_s: float, rtt_s: float = 0.05, seconds: float = 10.0) -> FlowWindow:
    """A pace that was measured until now_s = `seconds`."""
    pace = FlowWindow(0.0)
    pace.rtt_s = rtt_s
    pace.asked(0.0)
    steps = 200
    for step in range(1, steps + 1):
        pace.moved(round(rate_bytes_s * seconds / steps), step * seconds / steps)
    return pace


def test_the_window_follows_what_fits_into_the_path() -> None:
    assert FlowWindow(0.0).window(0.0, WINDOW) == FIRST_WINDOW
    assert fed(1e5).window(10.0, WINDOW) == 2, "a slow holder gets little"
    assert fed(2.5e6, 0.06).window(10.0, WINDOW) == 2
    assert fed(2.5e7, 0.1).window(10.0, WINDOW) == 7
    assert fed(2e8, 0.002).window(10.0, WINDOW) == 6, "loopback"
    assert fed(1e9, 0.2).window(10.0, WINDOW) == WINDOW


def test_a_pace_forgets_and_silence_counts() -> None:
    pace = fed(1e6)
    assert 0.99e6 < (pace.rate_bytes_s(10.0) or 0) < 1.01e6
    assert (pace.rate_bytes_s(20.0) or 0) < 0.5e6
    pace.idle()
    assert (pace.rate_bytes_s(1000.0) or 0) > 0.99e6, "nobody asked for anything"
    pace.asked(1000.0)
    for step in range(1, 200):
        pace.moved(1000, 1000 + step * 0.1)
    assert (pace.rate_bytes_s(1020.0) or 0) < 5e4


def test_who_is_far_behind_is_slow_after_a_while() -> None:
    plan = ChunkSchedule(255)
    plan.join(A, 255, fed(1e6))
    plan.join(B, 255, fed(0.99e5))
    plan.join(C, 255, fed(1.2e6))
    assert [plan.is_slow(peer, 10.0) for peer in (A, B, C)] == [False, True, False]
    plan.leave(A)
    plan.leave(C)
    assert not plan.is_slow(B, 10.0), "alone it is all there is"
    plan.join(A, 255, fed(1e6))
    plan.join(C, 255, fed(1e3, seconds=SLOW_AFTER_S * 0.8))
    assert not plan.is_slow(C, SLOW_AFTER_S * 0.8), "it had no time yet"


def test_the_last_chunk_is_asked_of_a_second_holder_when_the_first_is_late() -> None:
    plan = ChunkSchedule(0b11)
    plan.join(A, 0b11, fed(2e5))
    plan.join(B, 0b11, fed(5e6))
    plan.join(C, 0b01, fed(5e6))
    plan.ask(A, 0, 10.0)
    plan.ask(A, 1, 10.0)
    assert plan.next(B, 10.0) == 1, "the one that is due last"
    plan.ask(B, 1, 10.0)
    assert plan.next(C, 10.0) == 0
    plan.ask(C, 0, 10.0)
    plan.received(B, 1)
    plan.verified(1)
    assert plan.next(B, 10.3) is None, "two are enough"
    assert plan.stale(A) == [1]
    plan.leave(A)
    plan.leave(C)
    assert plan.next(B, 10.3) == 0


def test_a_fast_holder_is_not_doubled() -> None:
    plan = ChunkSchedule(0b1)
    plan.join(A, 0b1, fed(5e6))
    plan.join(B, 0b1, fed(5e6))
    plan.ask(A, 0, 10.0)
    assert plan.next(B, 10.0) is None
    assert plan.next(B, 12.0) == 0, "it has gone silent"
