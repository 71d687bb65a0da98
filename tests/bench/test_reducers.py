"""The council of `bench reducers`: who lies is found at the shipped rates, and who does not is left alone."""

import pytest

from tests.bench.reducers.council import Council, Lie, rounds_counted, shipped
from tests.bench.reducers.reducers import HONEST, LIES

MEMBERS, CHUNKS, ROUNDS = 6, 12, 40


@pytest.fixture
def play(tmp_path):
    def run(lie: Lie, seed: int) -> tuple[Council, list[int]]:
        council = Council(tmp_path, MEMBERS, CHUNKS, lie, seed, shipped(MEMBERS))
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
