"""An open run with a puzzle: a real node solves it when it joins, and the run says so before and after."""

import pytest

from tests.e2e.conftest import stop_all

pytestmark = pytest.mark.swarm


@pytest.mark.slow(
    slice="tests/node/virtual/test_virtual_puzzle.py::test_newcomers_solve_it_by_themselves_and_made_up_identities_get_no_room"
)
def test_a_newcomer_solves_the_puzzle_and_trains(nodes, until):
    owner, guest = nodes("owner"), nodes("guest")
    owner.new_run("--data", "synthetic:markov", "--puzzle", "14", "--set", "pace.min_members=2")
    assert "open: anybody that solves 14 bits" in owner.atoll("run", "show").out
    owner.start("--run", "tiny").up()
    guest.start("--run", str(owner.home.run_file("tiny")), "--seed", owner.seed()).up()
    until("rounds of both are final", lambda: min(owner.final(), guest.final()) >= 1)
    late = [row for row in owner.rows() if row["final"] and guest.status()["peer"] in row["contributors"]]
    assert late
    stop_all(guest, owner)
