"""The council of `bench reducers`: who lies is found at the shipped rates, and who does not is left alone."""

import pytest

from tests.bench.reducers.council import Council, Lie, rounds_counted, shipped
from tests.bench.reducers.gang import Gang
from tests.bench.reducers.reducers import ABSENT, HONEST, LIES

MEMBERS, CHUNKS, ROUNDS = 6, 12, 40


@pytest.fixture
def play(tmp_path):
    def run(lie: Lie, seed: int, **more: int) -> tuple[Council, list[int]]:
        council = Council(tmp_path, MEMBERS, CHUNKS, lie, seed, shipped(MEMBERS, **more))
        return council, rounds_counted(council, ROUNDS)

    return run


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
@pytest.mark.parametrize("seed", range(3))
def test_a_reducer_that_lies_or_is_silent_is_found_and_stays_out(play, lie, seed):
    council, counted = play(lie, seed)
    assert max(counted, default=-1) < 20
    assert len(council.planned) < ROUNDS - 4, "it loses its place"
    assert council.blamed == set(), "what it did is proven or witnessed, and no member is blamed for saying so"


@pytest.mark.parametrize("seed", range(3))
def test_an_honest_reducer_counts_in_every_round(play, seed):
    council, counted = play(HONEST, seed)
    assert counted == list(range(ROUNDS - 4))
    assert council.opened, "it was audited"
    assert not any(member.doubted for member in council.members)


@pytest.mark.parametrize("seed", range(3))
def test_a_reducer_that_opens_later_what_it_did_not_open_is_believed_again(play, seed):
    """Its worker died between a Reduction and its openings."""
    council, counted = play(ABSENT, seed, sample_256=1 << 16)
    assert council.blamed == set()
    assert len(counted) < ROUNDS - 4, "it was asked"
    assert len(counted) >= ROUNDS - 4 - 5, "one miss at most, which passes it over for `gap` rounds"
    assert not any(member.doubts.distrusted(ROUNDS, ROUNDS) for member in council.members)


def test_members_that_were_chosen_for_all_slices_and_reduce_nothing_lose_their_places():
    gang = Gang(members=24, chunks=6, tries=200)
    for number in range(100):
        gang.play_round(number)
    assert gang.mute[0] >= 5
    assert gang.share < 6 / 24
    assert set(gang.mute[5:9]) == {0}, "two rounds show it, and plans follow `gap` rounds later"


@pytest.mark.parametrize(("knowing", "loses"), [(15, False), (16, True)])
def test_misses_of_most_reducers_count_where_two_thirds_knew_that_they_were_to_reduce(knowing, loses):
    """Finality was slow: rounds closed before their reducers were known."""
    gang = Gang(members=24, chunks=6, tries=200, knowing=knowing)
    for number in range(12):
        gang.play_round(number)
    assert (gang.mute[-1] < gang.mute[0]) == loses


def test_a_set_without_a_reduction_costs_nobody_a_place():
    gang = Gang(members=24, chunks=6, tries=6, proposes=range(20, 21))
    for number in range(40):
        gang.play_round(number)
        assert {*gang.ledger.passed_over(number)} <= {*gang.gang}
