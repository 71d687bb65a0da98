"""The draw of neighbours: symmetric, one neighbour at most, as many pulls as its chances say, mostly late."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocols import codec
from atoll.protocols.errors import DecodeError
from atoll.protocols.identity import Identity
from atoll.protocols.pulls.draw import neighbour_of, pairs
from atoll.protocols.pulls.question import QUESTION_MAX_BYTES, PullQuestion
from atoll.protocols.run.sections.variants.gossip import GossipSpec

PEERS = [Identity(bytes([n]) * 32).peer_id for n in range(1, 10)]
RUN = bytes(range(32))
ALWAYS = GossipSpec(first_256=256, last_256=256)
LAWS = settings(max_examples=60, deadline=None)
MEMBERS = st.lists(st.sampled_from(PEERS), unique=True, max_size=9)
CHANCES = st.builds(GossipSpec, first_256=st.integers(0, 256), last_256=st.integers(0, 256))


@LAWS
@given(MEMBERS, CHANCES, st.integers(0, 1 << 24), st.integers(1, 40), st.randoms())
def test_it_is_symmetric_with_one_neighbour_at_most_in_any_order_of_members(members, gossip, number, tick, rng):
    drawn = pairs(gossip, RUN, number, tick, ticks=30, members=members)
    named = [peer for pair in drawn for peer in pair]
    assert len(named) == len(set(named))
    assert set(named) <= set(members)
    for peer in PEERS:
        other = neighbour_of(peer, drawn)
        assert other != peer
        assert other is None or neighbour_of(other, drawn) == peer
    shuffled = rng.sample(members, len(members))
    assert pairs(gossip, RUN, number, tick, ticks=30, members=shuffled) == drawn


@LAWS
@given(MEMBERS, st.integers(0, 1 << 24), st.integers(1, 40))
def test_a_chance_of_one_pairs_all_but_the_last_of_an_odd_number(members, number, tick):
    assert len(pairs(ALWAYS, RUN, number, tick, ticks=30, members=members)) == len(members) // 2
    never = GossipSpec(first_256=0, last_256=0)
    assert not pairs(never, RUN, number, tick, ticks=30, members=members)


@LAWS
@given(CHANCES, st.integers(1, 200))
def test_chances_are_linear_from_the_first_to_the_last_tick(gossip, ticks):
    found = [Fraction(*gossip.chance(tick, ticks)) for tick in range(1, ticks + 1)]
    assert found[-1] == Fraction(gossip.last_256, 256)
    assert gossip.chance(ticks + 7, ticks) == gossip.chance(ticks, ticks)
    if ticks > 1:
        assert found[0] == Fraction(gossip.first_256, 256)
        assert len({after - before for before, after in pairwise(found)}) == 1


def test_ticks_end_before_the_round_does():
    assert [GossipSpec(steps=3).ticks(steps) for steps in (1, 3, 4, 6, 7)] == [0, 0, 1, 1, 2]


def test_by_default_there_are_0_2_neighbours_a_tick_three_quarters_of_them_late():
    ticks, rounds = 100, 60

    def pulls(number, tick):
        return 2 * len(pairs(GossipSpec(), RUN, number, tick, ticks=ticks, members=PEERS[:8]))

    counts = [sum(pulls(number, tick) for number in range(rounds)) for tick in range(1, ticks + 1)]
    mean = sum(counts) / (ticks * rounds * 8)
    assert mean == pytest.approx(0.2, abs=0.01)
    assert sum(counts[ticks // 2 :]) / sum(counts) == pytest.approx(0.75, abs=0.02)


def test_everybody_meets_everybody():
    met = {
        pair if pair[0] < pair[1] else pair[::-1]
        for tick in range(1, 200)
        for pair in pairs(ALWAYS, RUN, 3, tick, ticks=10, members=PEERS[:6])
    }
    assert len(met) == 15


def test_run_round_and_tick_change_the_draw():
    def drawn(run=RUN, number=1, tick=1):
        return [pairs(ALWAYS, run, number, at, ticks=9, members=PEERS) for at in range(tick, tick + 9)]

    assert len({str(found) for found in (drawn(), drawn(bytes(32)), drawn(number=2), drawn(tick=20))}) == 4


ILLEGAL = ([-1, 1], [1 << 25, 1], [1, 0], [1, (1 << 20) + 1], [1], [1, 1, 1], [True, 1], "no")


@pytest.mark.parametrize("value", ILLEGAL)
def test_an_illegal_question_is_refused(value):
    with pytest.raises(DecodeError):
        codec.decode(codec.encode(value), PullQuestion, max_bytes=QUESTION_MAX_BYTES)


def test_a_legal_question_fits():
    assert len(codec.encode(PullQuestion(1 << 24, 1 << 20))) <= QUESTION_MAX_BYTES
