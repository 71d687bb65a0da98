"""Tests of and in the NAT lab: skipped with one loud line where the machine cannot run it."""

import pytest

from atoll_lab.capability import missing


@pytest.fixture(scope="session")
def lab_possible() -> None:
    """Skip, and never pass, where the lab cannot run."""
    if (lack := missing()) is not None:
        pytest.skip(lack)
