"""Cuts, kills, votes to exclude, and a member that signs two histories whose proof comes late: all meet again.

Without what a node asks about old rounds (orphans.py), 3 of the first 60 seeds end in two chains that never meet.
"""

import random

import pytest

from atoll.protocols.ids import Round
from atoll.protocols.ledger.records import Exclude
from tests.node.daemon.consensus.epoch_world import FAULTS, PEERS
from tests.node.daemon.consensus.twin_world import TwinWorld, goes_on

BLOCK = 3
MORE_HALVES = pytest.mark.slow(slice="test_two_halves_with_a_twin_in_each_meet")


def strike(world, rng):
    """One fault at random; a cut may part the members in turn, and lasts."""
    kind, node = rng.choice(FAULTS), rng.choice(world.nodes)
    if kind == "cut":
        sides = [rng.randint(0, 1) for _ in PEERS] if rng.random() < 0.5 else [0, 1] * 4
        world.side = dict(zip(PEERS, sides, strict=True))
        world.run(rng.randint(0, 60))
    else:
        world.strike(kind, node, rng)


def faulty(seed):
    """A world after faults, whole again; the member that others voted against is gone for good."""
    rng = random.Random(seed)
    world = TwinWorld(seed, rng.choice((4, 5, 6, 7)))
    world.proves = rng.choice((0.0, 0.0, 0.001, 0.01))
    bad = rng.choice(world.honest[1:])
    world.run(rng.randint(8, 40))
    world.fork()
    world.run(rng.randint(5, 30))
    for _ in range(rng.randint(2, 6)):
        for node in world.nodes[1:]:
            if node is not bad and node.is_up and node.state.live and rng.random() < 0.4:
                node.write(Exclude(Round(node.state.deciding), bad.peer, ""))
        strike(world, rng)
        world.run(rng.randint(5, 120))
    world.side = dict.fromkeys(PEERS, 0)
    bad.is_up = False
    for twin in world.twins:
        twin.is_up = twin.is_up and rng.random() < 0.5
    others = [node for node in world.honest if node is not bad]
    back = [node for node in others if not node.is_up and rng.random() < 0.7]
    if not any(node.is_up for node in [*others, *back]):
        back = others[:1]
    come_back(world, back)
    world.proves = 0.2
    world.run(60)
    return world


def come_back(world, nodes):
    for node in nodes:
        node.is_up = True
        node.boot(world.now)


def is_stranded(world):
    """Whether somebody waits for a final set, of which it lacks an entry that died with others."""
    up = [node for node in world.honest if node.is_up]
    here = {entry[0] for node in up for entry in [*node.ledger, *node.orphans]}
    asked = [node.state.missing.get(None) for node in up]  # by a quorum
    return any(each is not None and not here.issuperset(each.entries) for each in asked)


def shake(block):
    for seed in range(block * BLOCK, block * BLOCK + BLOCK):
        print(seed)
        world = faulty(seed)
        if is_stranded(world):
            come_back(world, [node for node in world.honest if not node.is_up])
            world.run(20)
        goes_on(world, 300)


@pytest.mark.parametrize("block", range(1))
def test_chains_meet_whatever_a_twin_and_faults_did(block):
    shake(block)


@pytest.mark.slow(slice="test_chains_meet_whatever_a_twin_and_faults_did")
@pytest.mark.parametrize("block", range(1, 67))
def test_chains_meet_whatever_a_twin_and_faults_did_in_more_worlds(block):
    shake(block)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=MORE_HALVES) for seed in (1, 2))])
def test_two_halves_with_a_twin_in_each_meet(seed):
    """Each half saw the twin's votes, and decided rounds that the other half cannot see without them."""
    world = TwinWorld(seed, 7)
    world.proves = 0.0
    world.run(30)
    world.fork()
    world.run(20)
    world.side = dict(zip(PEERS, [0, 1] * 4, strict=True))
    world.run(150)
    world.side = dict.fromkeys(PEERS, 0)
    world.proves = 0.2
    world.run(20)
    goes_on(world, 300)
