"""The inner steps of a zeroth-order run: two losses each, no gradient, and one byte of what is sent.

The module holds nothing of its own between two losses: before each it gets Θ moved by what the round has sent so
far and by ±ε along the step's direction, computed afresh from the view. So no error of the perturbations adds up,
a round needs no copy of the model, and what a member trained with is what its payload says.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.node.learning.inner.evaluate import evaluate
from atoll.node.learning.model.bridge import named_atoms, write_rows
from atoll.node.learning.model.decoder import loss_of
from atoll.node.learning.zeroth_order.directions import perturb, walsh_row, walsh_sums
from atoll.node.learning.zeroth_order.scalar_fold import write_scalars
from atoll.node.worker.learner import Learner
from atoll.node.worker.local_weights import SLAB_CHUNKS
from atoll.protocols.errors import TRAIN_AGAIN, Divergence
from atoll.protocols.ids import PeerId
from atoll.protocols.run.arena import CHUNK, arena_of
from atoll.protocols.run.learning_rate import learning_rate
from atoll.protocols.run.payload import TOP_SCALAR, Layout
from atoll.protocols.run.run_spec import RunSpec
from atoll.protocols.run.sections.zeroth_order import UNIT_BITS, seed_of, unit_of


class ScalarSteps:
    """Steps of one member along directions that everybody knows; SPSA (Spall, 1992), as MeZO takes them."""

    def __init__(self, spec: RunSpec, peer: PeerId, learner: Learner) -> None:
        """`learner` has the module; its local weights must be scratch."""
        self._spec = spec
        self._peer = peer
        self._learner = learner
        self._arena = arena_of(spec.model)
        self._unit = unit_of(spec.inner.lr, spec.inner.clip)
        self._slab_N4096 = torch.empty((min(SLAB_CHUNKS, self._arena.chunks), CHUNK))
        self._scalars: list[int] = []
        self._view_C4096: Tensor | None = None
        self._seed = np.uint64(0)

    def begin(self, number: int, view_C4096: Tensor) -> None:
        """Begin a round at the view, int32 `[C, 4096]`, which is never changed."""
        self._scalars = []
        self._view_C4096 = view_C4096
        self._seed = np.uint64(seed_of(self._spec.id, number, self._peer))

    def step(self, window_BT1: NDArray[np.int64], at: int) -> float:
        """Take one step with the rate of global step `at`; returns the mean of its two losses, nats per token.

        Raises Divergence if a loss is not finite; the step is then not taken.
        """
        inner, row = self._spec.inner, walsh_row(len(self._scalars))
        moved = -self._unit * 2.0**-UNIT_BITS * walsh_sums(np.array(self._scalars, np.int64))
        above, below = (self._loss(moved + sign * inner.spread * row, window_BT1) for sign in (1, -1))
        if not math.isfinite(above + below):
            raise Divergence(f"inner step {at}: losses {above} and {below}", hint=TRAIN_AGAIN)
        slope = max(-inner.clip, min(inner.clip, (above - below) / (2 * inner.spread)))
        scalar = round(learning_rate(inner, at) * slope / (self._unit * 2.0**-UNIT_BITS))
        # The rate never exceeds its peak, so only the unit's own rounding can go beyond the top.
        self._scalars.append(max(-TOP_SCALAR, min(TOP_SCALAR, scalar)))
        return (above + below) / 2

    def payload(self, layout: Layout) -> bytearray:
        """The payload of the round's steps."""
        return write_scalars(self._scalars, layout)

    def _loss(self, shift_512: NDArray[np.float64], window_BT1: NDArray[np.int64]) -> float:
        """Loss of the view moved by D · shift, over as many passes as a validation would take."""
        module, view_C4096 = self._learner.module, self._view_C4096
        assert view_C4096 is not None, "a round has begun"
        named, shift = named_atoms(module), shift_512.astype(np.float32)
        for start in range(0, self._arena.chunks, len(self._slab_N4096)):
            theta = view_C4096[start : start + len(self._slab_N4096)]
            slab = self._slab_N4096[: len(theta)]
            perturb(theta.numpy(), start, self._seed, shift, slab.numpy())
            write_rows(named, self._arena, start, slab)
        return evaluate(module, loss_of, window_BT1, 0).val_loss
