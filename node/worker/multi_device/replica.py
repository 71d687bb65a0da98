"""A module that trains some of a run's experts, with its optimiser: what every local rank builds alike."""

import os
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.node.learning.inner.loop import Inner
from atoll.node.learning.inner.private_passes import Privacy, Random
from atoll.node.learning.inner.step_share import ALONE, StepShare
from atoll.node.learning.model.bridge import all_values, trained_atoms
from atoll.node.learning.model.decoder import Decoder, loads_of, loss_of
from atoll.node.learning.model.lora import check_storage
from atoll.node.learning.model.moe import bias_updater, biases, forget_rows
from atoll.node.learning.plugged.module import plugged_module
from atoll.node.worker.objectives.step_term import StepTerm
from atoll.protocols.run.experts import experts_in
from atoll.protocols.run.run_spec import RunSpec


class StepMemory(NamedTuple):
    """What a step may hold at once; the sums of a step are the same but for their order."""

    micro_batch: int = 0
    """Sequences that pass through the module at once; 0: all."""
    recompute: bool = False
    """Whether backward passes compute layers again; if not, they do after memory ran out with one sequence."""
    quantized: bool = False
    """Whether moments are stored in eight bits (node/learning/inner/quantized.py); steps then differ a little."""


ALL_STORED = StepMemory()


class Replica:
    """Values are undefined until they are given."""

    def __init__(
        self,
        spec: RunSpec,
        experts: bytes,
        device: str,
        frozen: tuple[torch.dtype, bool],
        share: StepShare = ALONE,
        memory: StepMemory = ALL_STORED,
        random: Random = os.urandom,
    ) -> None:
        """`experts`: bitmap of those that are trained. `frozen`: how others are stored; whether on the host.
        `random`: of the noise of a run with `privacy`.

        Raises ConfigError for a way in which the base of a LoRA run cannot be stored, and for a model of
        a package that is not here.
        """
        if spec.model.lora_rank:
            check_storage(*frozen)
        mixture, count = spec.model.experts, spec.model.expert_count
        owned = experts_in(experts, count) if count else None
        if spec.model.plugin is not None:
            module, self.loss_of = plugged_module(spec.model)
        else:
            module, self.loss_of = Decoder(spec.model, owned, *frozen), loss_of
        self.module = module.to(device)
        recompute = self.module.recompute_layers if isinstance(self.module, Decoder) else _stores_all
        if memory.recompute:
            recompute()
        loads = loads_of if mixture and mixture.load_balance else None
        term = StepTerm(spec, next(self.module.parameters())) if spec.objective else None
        self.inner = Inner(
            self.module,
            self.loss_of if term is None else term.loss_of,
            spec.inner,
            by_atom=partial(trained_atoms, self.module),  # not a method: nothing here may keep itself alive
            before_step=partial(forget_rows, self.module) if term is None else term.begin,
            after_step=bias_updater(self.module, spec.model, share.total),
            share=share,
            micro_batch=memory.micro_batch,
            recompute=recompute,
            loads_of=loads if term is None else term.means_of,
            quantized=memory.quantized,
            privacy=Privacy(spec.privacy.clip, spec.privacy.noise, random) if spec.privacy else None,
        )

    @property
    def memory(self) -> StepMemory:
        """What a step may hold at once by now: less than at first where memory has run out."""
        recompute = isinstance(self.module, Decoder) and self.module.is_recomputed
        return StepMemory(self.inner.passes.micro_batch, recompute, self.inner.quantized)

    def values(self) -> Iterator[Tensor]:
        """All tensors that a forward pass reads, by name."""
        yield from all_values(self.module)

    def trained(self) -> Iterator[Tensor]:
        """The tensors that steps change, all float32."""
        yield from self.module.parameters()
        yield from biases(self.module)
        yield from self.inner.moments(self.inner.moved())


def _stores_all() -> bool:
    """A package's model has no layers that could be recomputed."""
    return False
