"""The loss of runs whose inner steps follow a share of the past folds' direction (FedCM); prints JSON lines.

    python -m tests.bench.fold_momentum --share 0.1 --decay 0.9 --seed 1

Four members with the numbers of `tiny`. U is what a round's fold adds to Θ, η the rate of an inner step:

    d ← decay · d + (1 − decay) · U / Σ η          once a round, the same on all members
    inner step: the optimizer's at the rate (1 − share) · η, then + share · η · d

FedCM (arXiv 2106.10874) mixes the direction into the gradient; here it is mixed into the step, because the
optimizers here do not move along the gradient. `d` is divided by 1 − decay^r, as the mean of r rounds. No byte
is sent for it. `--share 0`: without.
"""

import argparse
import json
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from atoll.node.learning.data.dataset import open_dataset
from atoll.node.learning.data.shakespeare import default_cache
from atoll.node.learning.inner.loop import Inner
from atoll.node.learning.model import bridge
from atoll.node.learning.model.decoder import Decoder, loss_of
from atoll.node.runs.presets import preset
from atoll.protocols.ids import peer_id_of
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.learning_rate import learning_rate
from atoll_bench.module_values import fill_module
from atoll_bench.reference_arms.baselines import Task
from tests.bench.delayed import LateRule, delayed_sparse

MEMBERS = 4


class DriftingTask(Task):
    """The task of members whose steps follow the mean direction of past folds."""

    share: float
    decay: float

    def begin(self, share: float, decay: float) -> None:
        """Before the first round."""
        self.share, self.decay = share, decay
        self._theta_C4096 = self.genesis_C4096()
        self._sum_C4096 = torch.zeros_like(self._theta_C4096)
        self.direction: dict[str, Tensor] = {}
        """Per unit of rate, by atom; empty before the first fold."""

    def folded(self, number: int, theta_C4096: Tensor) -> None:
        """Take in the fold of round `number`, after which the model is Θ."""
        first, steps = self.spec.steps_before(number), self.spec.steps(number)
        rates = sum(learning_rate(self.spec.inner, at) for at in range(first, first + steps))
        moved_C4096 = (theta_C4096 - self._theta_C4096) / rates
        self._sum_C4096 = self.decay * self._sum_C4096 + (1 - self.decay) * moved_C4096
        self._theta_C4096 = theta_C4096.clone()
        # A mean of few rounds: the weights of what there is add up to one.
        mean_C4096 = self._sum_C4096 / (1 - self.decay ** (number + 1))
        arena = arena_of(self.spec.model)
        self.direction = {name: torch.empty(atom.shape) for name, atom in self._atoms()}
        bridge.write_rows(self.direction, arena, 0, mean_C4096)

    def inner(self, lr_scale: float = 1.0) -> Inner:
        """A fresh member with the values Θ₀."""
        module = Decoder(self.spec.model)
        fill_module(module, self.genesis_C4096(), arena_of(self.spec.model))
        return _Drifting(module, self)

    def _atoms(self) -> list[tuple[str, Tensor]]:
        return list(bridge.named_atoms(Decoder(self.spec.model)).items())


class _Drifting(Inner):
    """A member's optimizer, and the share of the direction."""

    def __init__(self, module: Decoder, task: DriftingTask) -> None:
        super().__init__(module, loss_of, task.spec.inner)
        self._task = task

    def _update(self, found: Mapping[str, Tensor], norm: Tensor, rate: float) -> None:
        direction = self._task.direction
        share = self._task.share if direction else 0.0
        super()._update(found, norm, (1 - share) * rate)
        if share:
            with torch.no_grad():
                for name, values in self._atoms.items():
                    values.add_(direction[name], alpha=share * rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--decay", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(1)
    spec = preset("tiny", peer_id_of(bytes(range(32))), given.seed)
    data = open_dataset(spec.data, spec.model.context, "", default_cache())
    task = DriftingTask(spec, data, MEMBERS, spec.outer.rounds)
    task.begin(given.share, given.decay)
    began_s = time.process_time()
    for point in delayed_sparse(task, LateRule("rebase", 1.0), folded=task.folded):
        if point.round % 10 == 0 or point.round == spec.outer.rounds - 1:
            row = {**vars(given), "round": point.round, "val_bpb": point.val_bpb}
            print(json.dumps({**row, "cpu_s": round(time.process_time() - began_s)}), flush=True)


if __name__ == "__main__":
    main()
