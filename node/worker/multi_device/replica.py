"""A module that trains some of a run's experts, with its optimiser: what every local rank builds alike."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from atoll.node.learning.inner.loop import ALONE, Inner, StepShare
from atoll.node.learning.model.bridge import all_values, trained_atoms
from atoll.node.learning.model.decoder import Decoder, loss_of
from atoll.node.learning.model.moe import bias_updater, biases
from atoll.protocols.run.experts import experts_in
from atoll.protocols.run.run_spec import RunSpec


class Replica:
    """Values are undefined until they are given."""

    def __init__(
        self,
        spec: RunSpec,
        experts: bytes,
        device: str,
        frozen: tuple[torch.dtype, bool],
        share: StepShare = ALONE,
    ) -> None:
        """`experts`: bitmap of those that are trained. `frozen`: how others are stored; whether on the host."""
        mixture = spec.model.experts
        owned = experts_in(experts, mixture.count) if mixture else None
        self.module = Decoder(spec.model, owned, *frozen).to(device)
        loss = loss_of if share is ALONE else partial(loss_of, pool=share.mean)
        after_step = bias_updater(self.module, spec.model, share.total)
        by_atom = partial(trained_atoms, self.module)  # not a method: nothing here may keep itself alive
        self.inner = Inner(self.module, loss, spec.inner, by_atom=by_atom, after_step=after_step, share=share)

    def values(self) -> Iterator[Tensor]:
        """All tensors that a forward pass reads, by name."""
        yield from all_values(self.module)

    def trained(self) -> Iterator[Tensor]:
        """The tensors that steps change, all float32."""
        yield from self.module.parameters()
        yield from biases(self.module)
        yield from self.inner.moments(self.inner.moved())
