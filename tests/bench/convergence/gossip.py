"""Gossip within a round (`outer.gossip`; "A Single Merging Suffices", arXiv 2507.06542), beside rarer rounds.

    python -m atoll_bench.convergence.gossip [--rounds 100] [--seeds 3]

Eight members train from their own weights, in one round of the product: its draw, its codec and its mixing, with a
tick after every 15 steps. At last all are merged into their mean, which is the round's fold. A neighbour gets a
payload of `int8`. In the other arms all members exchange float32 models in each round or in every n-th one, which
is plain averaging. docs/gossip-merge.md has the figures.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from atoll.node.learning.compress.codecs import codec_of
from atoll.node.learning.data.dataset import open_dataset
from atoll.node.learning.data.shakespeare import default_cache
from atoll.node.learning.outer.fixed import to_fixed
from atoll.node.learning.outer.pairwise import mixed, share_of
from atoll.protocols.ids import PeerId
from atoll.protocols.pulls.draw import neighbour_of, pairs
from atoll.protocols.run.payload import payload_bytes
from atoll.protocols.run.sections.variants.gossip import GossipSpec
from atoll_bench.convergence.arm_lines import print_lines
from atoll_bench.convergence.arms import MEMBERS, arm_of, spec_of
from atoll_bench.convergence.crew import CrewRounds
from atoll_bench.reference_arms.baselines import Task

STEPS = 15
INT8 = codec_of("int8", 4096)
PEERS = [PeerId(f"member {slot}") for slot in range(MEMBERS)]

SCHEDULES: dict[str, GossipSpec | int] = {
    # A number: all members exchange in every n-th round; with 0 in none before the merge.
    "no exchange": 0,
    "0.2 neighbours, late": GossipSpec(),
    "0.2 neighbours": GossipSpec(first_256=51, last_256=51),
    "0.2 neighbours, early": GossipSpec(first_256=102, last_256=0),
    "1 neighbour": GossipSpec(first_256=256, last_256=256),
    # As many bytes as 0.2 neighbours and a merge, all in float32: an all-reduce sends 2·7/8 of a model.
    "all, every 8th round": 8,
    "all, every round": 1,
}


class Gossip(CrewRounds):
    """Members that train on from their own weights, and mix a neighbour or all after each H steps."""

    def __init__(self, task: Task, folder: Path, schedule: GossipSpec | int) -> None:
        super().__init__(task, folder, exact=True)
        self._schedule = schedule
        self._base_MC4096 = self.weights()
        self.bytes = 0.0
        """Bytes that a member sent, on average; without the merge."""

    def round(self, number: int) -> Sequence[float]:
        """All members' steps up to the next tick, then its exchange; the losses of all steps."""
        task = self._task
        losses = self.together(number, 0, task.spec.steps(number))
        if isinstance(self._schedule, GossipSpec):
            self._pull(self._schedule, number + 1)
        elif self._schedule and number % self._schedule == self._schedule - 1:
            mean_C4096 = self.weights().mean(dim=0).float()
            for slot in range(task.members):
                self.crew.write(slot, mean_C4096)
            self.bytes += 4 * task.spec.model.parameters
        return losses

    def _pull(self, gossip: GossipSpec, tick: int) -> None:
        """What the pairs of a tick do, all at once; after the last steps there is no tick but the merge."""
        task, ticks = self._task, self._task.rounds - 1
        if tick > ticks:
            return
        run = task.spec.seed.to_bytes(32, "little")
        drawn = pairs(gossip, run, 0, tick, ticks=ticks, members=PEERS[: task.members])
        local = [self.crew.read(slot) for slot in range(task.members)]
        for slot, peer in enumerate(PEERS[: task.members]):
            if (other := neighbour_of(peer, drawn)) is not None:
                self.crew.write(slot, self._mixed(slot, local, PEERS.index(other)))
        each = payload_bytes("int8", len(local[0]), 4096)
        self.bytes += 2 * len(drawn) * each / task.members

    def _mixed(self, slot: int, local: list[Tensor], other: int) -> Tensor:
        """A member's weights with what its neighbour's payload holds."""
        base_C4096 = self._base_MC4096[other].float()
        theirs_C4096 = torch.zeros_like(base_C4096)
        INT8.give_back(theirs_C4096, INT8.encode(theirs_C4096.clone(), base_C4096, local[other], 1.0))
        own_C4096 = self._base_MC4096[slot].float()
        squares = [float(each.double().square().sum()) for each in (own_C4096 - local[slot], theirs_C4096)]
        return mixed(local[slot], own_C4096, theirs_C4096, share_of(*squares))

    def weights(self) -> Tensor:
        """Each member's weights, float64 `[M, C, 4096]`."""
        return torch.stack([self.crew.read(slot).double() for slot in range(self._task.members)])

    def bpb(self, weights_C4096: Tensor) -> float:
        """Validation loss, bits per byte."""
        return self._learners[0].evaluate(to_fixed(weights_C4096), self._val_WT1, self._val_bytes).val_bpb


def run(name: str, seed: int, rounds: int, size: str) -> dict[str, object]:
    """Train an arm; what it gave."""
    spec = spec_of(arm_of("average-float32", size, total=STEPS * rounds, seed=seed, steps=STEPS))
    data = open_dataset(spec.data, spec.model.context, "", default_cache())
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        arm = Gossip(Task(spec, data, MEMBERS, spec.outer.rounds), Path(folder), SCHEDULES[name])
        for number in range(spec.outer.rounds):
            arm.round(number)
        weights_MC4096 = arm.weights()
        model_bytes = 4 * spec.model.parameters
        return {
            "val_bpb": arm.bpb(weights_MC4096.mean(dim=0)),
            "first_alone_bpb": arm.bpb(weights_MC4096[0]),
            "sent_models": arm.bytes / model_bytes + 1,  # the merge
            "model_bytes": model_bytes,
        }


if __name__ == "__main__":
    print_lines(run, SCHEDULES, __doc__, f"{STEPS} steps")
