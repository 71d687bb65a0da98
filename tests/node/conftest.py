"""Fixtures that several rooms of `node` share."""

from types import SimpleNamespace

import pytest


@pytest.fixture(scope="session")
def world_of():
    """Makes a swarm of some members."""
    # Here, not above: it imports torch, which takes seconds, and most tests of the daemon's rooms need neither.
    from tests.node.reduction_world import World

    return World


@pytest.fixture
def small(world_of):
    """Five members that contributed once."""
    world = world_of(5)
    return SimpleNamespace(world=world, offers=[world.offer(number, weight=40 + number) for number in range(5)])
