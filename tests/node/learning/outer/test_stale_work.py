"""Work of an older base in the fold: golden states, and what a quadratic comes to with each way to weigh it."""

import pytest
import torch

from atoll.node.daemon.audits.stale_weights import by_rarity, share_of_age
from atoll.node.learning.compress.codecs import codec_of
from atoll.node.learning.compress.folding import OuterStep
from atoll.node.learning.outer.fixed import state_digest
from atoll.protocols.ledger.probation import scaled
from tests.node.learning.outer.conftest import pattern

CHUNKS, SLOWER, MOST, CLAIMED = 2, 4, 3, 255
FAST, SLOW = (0, 1), 2
"""Two members are in every round; one is in each fourth, with work of three rounds before."""
GOLDEN = {
    "equal": "bb78ce1ea4b8971a5e6008dc6b95afec4aa460c7503cedd3b40a84e0d5295e38",
    "fedbuff": "89798744047cd693c13c0ed6d2d90a3a50b871e3c5bb84d8ddae0cbbfc336d58",
    "fedfix": "48e57ddd6d83665505013714f53a40d33fb1210f9a7fd60488fd99b8ef9a94f8",
}
"""State digest after nine rounds; changes only with the weights, or the arithmetic of the codec or its mean."""


class Swarm:
    """Members that train towards targets of their own, and the weights that their payloads move."""

    def __init__(self, name, targets):
        self.name, self.targets = name, targets
        self.codec, self.step = codec_of("int8", 4096), OuterStep(256, 64)
        self.thetas = [torch.zeros((CHUNKS, 4096), dtype=torch.int32)]
        self.sets = []

    def round(self):
        number, nothing = len(self.sets), torch.zeros((CHUNKS, 4096))
        ages = dict.fromkeys(FAST, 0) | ({SLOW: SLOWER - 1} if number % SLOWER == SLOWER - 1 else {})
        payloads = []
        for who, age in ages.items():
            delta_C4096 = (self.thetas[number - age].float() * 2.0**-24 - self.targets[who]) * 0.1
            payloads.append(self.codec.encode(delta_C4096, nothing, nothing, 1.0))
        weights = [self.weight(who, age) for who, age in ages.items()]
        self.thetas.append(self.codec.apply_update(self.thetas[-1], weights, payloads, self.step))
        self.sets.append(frozenset(ages))

    def weight(self, who, age):
        if self.name == "fedfix":
            return by_rarity(CLAIMED, self.sets[-4 * (MOST + 1) :], who, MOST)
        return scaled(CLAIMED, share_of_age(age)) if self.name == "fedbuff" else CLAIMED

    def distance(self, target):
        """Of the mean over the newest four rounds, from a target."""
        newest = torch.stack([theta.float() * 2.0**-24 for theta in self.thetas[-SLOWER:]]).mean(dim=0)
        return float((newest - target).norm() / target.norm())


@pytest.mark.parametrize("name", GOLDEN)
def test_the_golden_trajectory(name):
    swarm = Swarm(name, [pattern(CHUNKS, seed).float() / 64 for seed in range(1, 4)])
    for _ in range(9):
        swarm.round()
    assert state_digest(swarm.thetas[-1]).hex() == GOLDEN[name]


@pytest.mark.parametrize("name", GOLDEN)
def test_on_a_quadratic_theta_comes_to_the_members_target_and_stays(name):
    target = pattern(CHUNKS, 5).float() / 8
    swarm = Swarm(name, [target] * 3)
    for _ in range(120):
        swarm.round()
    assert swarm.distance(target) < 1e-3


def test_fedfix_comes_nearer_to_the_mean_of_different_targets_and_fedbuff_does_not():
    """Weights for age take even more from the slow member. Those of FedFix give it a sixth of the long run, not a
    third: each round's step is the mean of its own set. With equal weights it has a twelfth.
    """
    targets = [pattern(CHUNKS, 5).float() / 8] * 2 + [pattern(CHUNKS, 9).float() / 8]
    found = {}
    for name in GOLDEN:
        swarm = Swarm(name, targets)
        for _ in range(120):
            swarm.round()
        found[name] = swarm.distance(sum(targets) / 3)
    assert found["fedfix"] < 0.72 * found["equal"], found
    assert found["equal"] < 0.9 * found["fedbuff"], found
