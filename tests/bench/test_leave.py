"""`bench leave` plays every departure once, in swarms that follow from each other."""

import asyncio
from itertools import pairwise

import pytest

from atoll.protocols.errors import DecodeError
from atoll_bench.leave.departures import Cost, Departure, chains
from atoll_bench.leave.leave import WAYS, measure
from atoll_bench.leave.stored import PlayedChain, read_chain, write_chain


def test_every_departure_is_played_once():
    played = [departure for chain in chains(8) for departure in chain]
    assert sorted(played) == [Departure(n, gone) for n in range(2, 9) for gone in range(1, n)]


def test_who_left_is_gone_in_the_next_departure():
    for chain in chains(8):
        for before, after in pairwise(chain):
            assert after.members == before.members - before.gone


CHAIN = [Departure(2, 1)]


def _played(way, took_s, *violations):
    return PlayedChain(
        costs=(Cost(CHAIN[0], way, round_s=2.0, took_s=took_s, trained=1),), violations=tuple(violations)
    )


def _rows(folder, **options):
    """Of what is stored: no swarm may begin."""
    return asyncio.run(measure(False, pytest.fail, store=str(folder), minutes=0, **options))


def test_a_stored_chain_is_not_played_again(tmp_path):
    for way, took_s in zip(WAYS, (3.0, 8.0), strict=True):
        write_chain(tmp_path, CHAIN, way, _played(way, took_s, *(["two digests"] if way == "kill" else [])))
    stopped, killed, violations = _rows(tmp_path, nodes=2)
    assert (stopped.value, stopped.passed) == (1.5, True)
    assert (killed.value, killed.passed) == (4.0, False)
    assert (violations.value, violations.passed) == (1, False)


def test_what_was_not_played_is_not_measured(tmp_path):
    write_chain(tmp_path, CHAIN, "stop", _played("stop", 3.0))
    stopped, killed, _ = _rows(tmp_path, nodes=2)
    assert stopped.value == 1.5
    assert (killed.value, killed.bar) == (None, "<= 3")  # so the bench ends with 1


def test_a_file_that_is_no_chain_is_refused(tmp_path):
    write_chain(tmp_path, CHAIN, "stop", _played("stop", 3.0))
    next(tmp_path.iterdir()).write_bytes(b"{}")
    with pytest.raises(DecodeError):
        read_chain(tmp_path, CHAIN, "stop")
