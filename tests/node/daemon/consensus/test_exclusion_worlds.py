"""Votes to exclude in worlds with loss, restarts and a member that signs two histories: all exclude alike.

No honest member vanishes or is cut off meanwhile: test_twin_worlds.py has these faults.
"""

import random

import pytest

from atoll.protocols.ids import Round
from atoll.protocols.ledger.records import Excise, Exclude
from tests.node.daemon.consensus.twin_world import TwinWorld, goes_on

MORE = pytest.mark.slow(slice="test_a_twin_and_votes_to_exclude_split_nobody_and_stop_nobody")


def shaken(seed, excise_rounds):
    """Who was excluded in the end. The run's owner has no vote, so the twin's is needed."""
    rng = random.Random(seed)
    world = TwinWorld(seed, rng.choice((6, 6, 7)), excise_rounds)
    world.proves = rng.choice((0.01, 0.03, 0.1))
    bad = rng.choice(world.nodes[1:])

    def removal(number):
        return Excise(number, bad.peer, "", Round(0)) if excise_rounds else Exclude(number, bad.peer, "")

    world.run(rng.randint(8, 20))
    world.fork()
    for _ in range(rng.randint(3, 7)):
        for node in world.honest[1:]:
            if node is not bad and node.is_up and node.state.live and rng.random() < 0.9:
                node.write(removal(node.state.deciding))
        twin = rng.choice(world.twins)
        if bad.peer != world.twin and rng.random() < 0.8:
            twin.write(removal(twin.state.deciding))
        if rng.random() < 0.5:
            rng.choice(world.honest).boot(world.now)
        world.run(rng.randint(5, 60))
    for node in world.nodes:
        node.is_up = node.is_up and node.peer != bad.peer
    world.proves = 0.2
    world.run(20)
    return goes_on(world, 300)


@pytest.mark.parametrize(
    ("block", "excise_rounds"),
    [
        (0, 12),
        (2, 0),
        *(pytest.param(block, 0, marks=MORE) for block in (0, 1, 3)),
        *(pytest.param(block, 12, marks=MORE) for block in (1, 2, 3)),
    ],
)
def test_a_twin_and_votes_to_exclude_split_nobody_and_stop_nobody(block, excise_rounds):
    found = [bool(shaken(seed, excise_rounds)) for seed in range(block * 4, block * 4 + 4)]
    print(found)
    assert any(found)
