"""`bench leave` plays every departure once, in swarms that follow from each other."""

from itertools import pairwise

from atoll_bench.leave.leave import Departure, chains


def test_every_departure_is_played_once():
    played = [departure for chain in chains(8) for departure in chain]
    assert sorted(played) == [Departure(n, gone) for n in range(2, 9) for gone in range(1, n)]


def test_who_left_is_gone_in_the_next_departure():
    for chain in chains(8):
        for before, after in pairwise(chain):
            assert after.members == before.members - before.gone
