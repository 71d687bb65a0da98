"""Members whose steps are taken in one pass: the product's decoder and AdamW over one stack of weights.

A step of a small model is mostly calls of small functions, so eight members in one pass take about a third of the
time of eight passes. Losses and weights are the product's but for the order of sums, and a test compares them. For
trials of what the product does not have: nobody needs a worker's bits there.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from atoll.node.learning.inner.adamw import adamw_step
from atoll.node.learning.model.decoder import Decoder
from atoll.node.learning.outer.fixed import to_float
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.learning_rate import learning_rate
from atoll.protocols.run.model_spec import ModelSpec
from atoll.protocols.run.run_spec import RunSpec
from atoll_bench.convergence.trial import _Rounds
from atoll_bench.module_values import fill_module, read_module
from atoll_bench.reference_arms.baselines import Task

Windows = NDArray[np.int64]
_CLIP_EPS = 1e-6


class _Loss(nn.Module):
    """The decoder's mean cross-entropy; the product's own function of it has no batched form."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, window_BT1: Tensor) -> Tensor:
        def readout(x_BTD: Tensor, head_VD: Tensor) -> Tensor:
            return functional.cross_entropy((x_BTD @ head_VD.T).flatten(0, 1), window_BT1[:, 1:].flatten())

        loss: Tensor = self.decoder(window_BT1[:, :-1], None, readout)
        return loss


@cache
def _traced(model: ModelSpec, shape_MBT1: tuple[int, ...]) -> Callable[..., tuple[dict[str, Tensor], Tensor]]:
    """Gradients and losses as one list of operations, without what finds them anew in each step.

    To find them takes longer than a hundred steps of a small model, so all crews of this shape share them. Weights
    are inputs of the list.
    """
    loss = _Loss(Decoder(model))
    each = vmap(grad_and_value(partial(functional_call, loss)))
    values = {name: torch.zeros((shape_MBT1[0], *value.shape)) for name, value in loss.named_parameters()}
    with sdpa_kernel(SDPBackend.MATH):  # the other kernels have no batched form
        return make_fx(each)(values, torch.zeros(shape_MBT1, dtype=torch.int64))


class Crew:
    """M members of a dense run without plug-ins, trained by AdamW; all take as many steps."""

    def __init__(self, spec: RunSpec, members: int) -> None:
        self._spec, self._arena = spec, arena_of(spec.model)
        self._decoder = Decoder(spec.model)
        self._loss = _Loss(self._decoder)
        named = dict(self._loss.named_parameters())
        self._values = {name: torch.zeros((members, *value.shape)) for name, value in named.items()}
        first, second = ([torch.zeros_like(value) for value in self._values.values()] for _ in range(2))
        self._moments = dict(zip(self._values, zip(first, second, strict=True), strict=True))
        self._counts = {name: torch.zeros(()) for name in self._values}

    def step(self, window_MBT1: Windows, at: int) -> list[float]:
        """One step of all members, at the rate of global step `at`; their losses before it."""
        traced = _traced(self._spec.model, window_MBT1.shape)
        gradients, loss_M = traced(self._values, torch.from_numpy(window_MBT1))
        squares_M = torch.stack([each.square().flatten(1).sum(1) for each in gradients.values()]).sum(0)
        scale_M = (self._spec.inner.clip / (squares_M.sqrt() + _CLIP_EPS)).clamp(max=1.0)
        rate, decay = learning_rate(self._spec.inner, at), self._spec.inner.weight_decay
        for is_matrix in (True, False):
            names = [name for name, value in self._values.items() if (value.dim() > 2) is is_matrix]
            scaled = [gradients[name] * scale_M.view(-1, *[1] * (gradients[name].dim() - 1)) for name in names]
            values, counts = ([of[name] for name in names] for of in (self._values, self._counts))
            first, second = ([self._moments[name][kind] for name in names] for kind in range(2))
            adamw_step(values, scaled, first, second, counts, self._spec.inner, rate, decay if is_matrix else 0.0)
        losses: list[float] = loss_M.tolist()
        return losses

    def read(self, slot: int) -> Tensor:
        """A member's weights, float32 `[C, 4096]`."""
        for name, value in self._loss.named_parameters():
            value.data.copy_(self._values[name][slot])
        return read_module(self._decoder, self._arena)

    def write(self, slot: int, weights_C4096: Tensor) -> None:
        """Replace a member's weights; its moments stay."""
        fill_module(self._decoder, weights_C4096, self._arena)
        for name, value in self._loss.named_parameters():
            self._values[name][slot] = value.detach()


class CrewRounds(_Rounds):
    """Rounds whose members' steps are taken together; nothing that comes after them differs."""

    def __init__(self, task: Task, folder: Path, *, exact: bool) -> None:
        super().__init__(task, folder, exact=exact)
        self.crew = Crew(task.spec, task.members)
        for slot in range(task.members):
            self.crew.write(slot, to_float(self.fold.view_C4096))

    def together(self, number: int, first: int, count: int) -> list[float]:
        """So many steps of a round, of all members; the losses."""
        task, losses = self._task, list[float]()
        for step in range(first, first + count):
            window_MBT1 = np.stack([task.batch(number, slot, step) for slot in range(task.members)])
            losses += self.crew.step(window_MBT1, task.spec.steps_before(number) + step)
        return losses

    def _train(self, number: int, slot: int) -> Sequence[float]:  # type: ignore[override]
        losses = list[float]()
        if not slot:
            for each in range(self._task.members):
                self.crew.write(each, to_float(self.fold.view_C4096))
            losses = self.together(number, 0, self._task.spec.steps(number))
        learner = self._learners[slot]
        learner.weights.start(self.fold.view_C4096)
        fill_module(learner.module, self.crew.read(slot), arena_of(self._task.spec.model))
        return losses
