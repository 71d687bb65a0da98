"""What a worker trains with: the module, its optimiser and its local weights; and which experts are trained.

Who trains some of the experts has parameters, gradients and moments for these alone; the others are frozen copies,
stored as the node likes (docs/models.md). Before the first round of such a run nothing but what all members train
has parameters: a model that is too large to be trained whole must not be built whole.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from atoll.node.holding import nothing, splits
from atoll.node.inner.loop import Inner
from atoll.node.local_weights import LocalWeights
from atoll.node.model.balance import follower
from atoll.node.model.decoder import Decoder, loss_of
from atoll.node.model.named import trained_atoms
from atoll.protocols.experts import ALL, bitmap_of, experts_in
from atoll.protocols.model import expert_of
from atoll.protocols.run import RunSpec


class Learner:
    """`module`, `inner` and `weights` are replaced by `own`: ask for them each time."""

    def __init__(
        self, spec: RunSpec, device: str, frozen_dtype: str = "float32", frozen_on_host: bool = False
    ) -> None:
        """Values are undefined until `weights.start` or `weights.load`."""
        self._spec, self._device = spec, device
        self._storage = getattr(torch, frozen_dtype), frozen_on_host
        experts = nothing(spec)
        self._build(experts)
        self.weights = LocalWeights(self.module, spec, experts)

    @property
    def experts(self) -> bytes:
        """Bitmap of those that are trained."""
        return self.weights.experts

    def own(self, experts: bytes) -> None:
        """Train these experts from now on. What stays keeps weights and moments; what is new starts with the
        anchor and fresh moments; what is given up is frozen as the anchor has it.

        All goes through the host's memory, so that the device never holds two modules.
        """
        if experts == self.experts:
            return
        trained = _on_host(self.weights.trained())
        moments = _on_host(self.inner.state())
        del self.module, self.inner
        self.weights.let_go()
        self._build(experts)
        self.weights.move_to(self.module, experts, trained)
        self.inner.load(moments)

    def _build(self, experts: bytes) -> None:
        spec, mixture = self._spec, self._spec.model.experts
        owned = experts_in(experts, mixture.count) if mixture else None
        self.module = Decoder(spec.model, owned, *self._storage).to(self._device)

        def by_atom(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return trained_atoms(self.module, tensors)

        after_step = follower(self.module, spec.model)
        self.inner = Inner(self.module, loss_of, spec.inner, by_atom=by_atom, after_step=after_step)


def experts_among(names: Iterable[str], spec: RunSpec) -> bytes:
    """Bitmap of the experts that a saved state had trained, by the names of its tensors."""
    if not splits(spec):
        return ALL
    found = (expert_of(name) for name in names)
    return bitmap_of((expert for expert in found if expert is not None), splits(spec))


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to("cpu", copy=True) for name, value in tensors.items()}
