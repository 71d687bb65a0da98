"""A slice of `make rig`: two routers are punched, a symmetric one is relayed; one without UDP in `make slow`."""

import pytest

from atoll_lab.lab import Nat
from tests.rig import punch_cases

pytestmark = [pytest.mark.usefixtures("lab_possible"), pytest.mark.swarm]


def test_homes_are_punched():
    row = punch_cases.punched(3)
    assert row.holds, str(row)


SLOW = pytest.mark.slow(slice="test_homes_that_cannot_be_punched_are_relayed")


@pytest.mark.parametrize("nat", [Nat.SYMMETRIC, pytest.param(Nat.NOUDP, marks=SLOW)])
def test_homes_that_cannot_be_punched_are_relayed(nat):
    row = punch_cases.relayed(nat, 2)
    assert row.holds, str(row)
