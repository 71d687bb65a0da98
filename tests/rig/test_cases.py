"""A slice of `make rig`: two routers are punched, a symmetric one is relayed; one without UDP in `make slow`."""

import pytest

from atoll_lab.lab import Nat
from tests.rig import punch_cases
from tests.tracebacks import tracebacks

pytestmark = [pytest.mark.usefixtures("lab_possible"), pytest.mark.swarm]


def test_homes_are_punched(tmp_path):
    row = punch_cases.punched(3, tmp_path)
    assert row.holds, str(row)
    assert tracebacks(tmp_path) == []


SLOW = pytest.mark.slow(slice="test_homes_that_cannot_be_punched_are_relayed")


@pytest.mark.parametrize("nat", [Nat.SYMMETRIC, pytest.param(Nat.NOUDP, marks=SLOW)])
def test_homes_that_cannot_be_punched_are_relayed(nat, tmp_path):
    row = punch_cases.relayed(nat, 2, tmp_path)
    assert row.holds, str(row)
    assert tracebacks(tmp_path) == []
