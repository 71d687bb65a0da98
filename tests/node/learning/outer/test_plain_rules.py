"""Plain averaging, and SparseLoCo as its authors coded it: golden states of three rounds, and a quadratic.

Neither has a state of its own in the fold, so a step is the codec's mean alone, as `SetUpdate` takes it.
"""

import pytest
import torch

from atoll.node.learning.compress.codecs import codec_of
from atoll.node.learning.compress.folding import OuterStep
from atoll.node.learning.outer.fixed import state_digest
from tests.node.learning.outer.conftest import pattern

CHUNKS, MEMBERS = 4, 2
CASES = {"average": ("int8", 4096, 64), "reference": ("lookup2", 1024, 1)}
"""Codec, k, `outer.floor_256`; α is 1."""
GOLDEN = {
    "average": "9acc2ba3982281c12c9a4b52a37f4328bbbf43ae757ccf348977ba91734c0d05",
    "reference": "3d6f12d54589203c9c898ec455579f9a0c6175f60877df343c1e78d43b663052",
}
"""State digest after three rounds; changes only with the arithmetic of a codec or its mean."""


class Swarm:
    """Members with error feedback that does not decay, and the weights that their payloads move."""

    def __init__(self, name):
        codec, k, floor_256 = CASES[name]
        self.codec, self.step = codec_of(codec, k), OuterStep(256, floor_256)
        self.theta_C4096 = torch.zeros((CHUNKS, 4096), dtype=torch.int32)
        self.errors = [torch.zeros((CHUNKS, 4096)) for _ in range(MEMBERS)]

    def round(self, *deltas):
        """One round of these pseudo-gradients, one for each member."""
        nothing, payloads = torch.zeros((CHUNKS, 4096)), []
        for error_C4096, delta in zip(self.errors, deltas, strict=True):
            error_C4096 += delta
            payloads.append(self.codec.encode(error_C4096, nothing, nothing, 1.0))  # what is left stays in it
        self.theta_C4096 = self.codec.apply_update(self.theta_C4096, [64] * MEMBERS, payloads, self.step)


@pytest.mark.parametrize("name", CASES)
def test_the_golden_trajectory(name):
    swarm = Swarm(name)
    for number in range(3):
        swarm.round(*(pattern(CHUNKS, 1 + MEMBERS * number + at).float() / 64 for at in range(MEMBERS)))
    assert state_digest(swarm.theta_C4096).hex() == GOLDEN[name]


@pytest.mark.parametrize("name", CASES)
def test_on_a_quadratic_theta_comes_to_the_members_target_and_stays(name):
    """Δ is a tenth of the way to the target: what members send whose loss is a quadratic around it."""
    swarm, target = Swarm(name), pattern(CHUNKS, 5).float() / 8
    for _ in range(300):
        delta = (swarm.theta_C4096.float() * 2.0**-24 - target) * 0.1
        swarm.round(*[delta] * MEMBERS)
    distance = (swarm.theta_C4096.float() * 2.0**-24 - target).norm() / target.norm()
    assert float(distance) < 1e-3
