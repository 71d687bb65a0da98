"""How the sequences of a step pass through the module: some at a time, as many as memory holds.

The gradients of the passes add up to the whole step's, in another order of sums. How many sequences pass at once
is therefore each node's own choice, and it may change between two attempts at one step.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from atoll.node.learning.inner.step_share import StepShare
from atoll.protocols.errors import LocalFault

log = logging.getLogger(__name__)

Loss = Callable[..., Tensor]
"""Computes the mean loss, nats per token, of a module on int64 windows `[B, T + 1]`. With `Loads` it also takes
`pool`, which turns loads of these windows into those of the step."""
Loads = Callable[[nn.Module, Tensor], Tensor]
"""Computes, without gradient, means over the tokens of windows; the loss of one token depends on all tokens'."""
_SHORT = ("can't allocate memory", "bad_alloc", "out of memory", "ALLOC_FAILED")
"""How allocators and cuBLAS say it: that of a CPU has no exception of its own."""


class Passes:
    """Adds up the gradients of a step, and holds fewer sequences at once after memory ran out."""

    def __init__(
        self,
        joined: nn.Module,
        loss_of: Loss,
        share: StepShare,
        *,
        micro_batch: int,
        recompute: Callable[[], bool] = lambda: False,
        loads_of: Loads | None = None,
    ) -> None:
        """`micro_batch`: sequences of a pass; 0: all. `recompute`: makes the module store less, if it can."""
        self._joined, self._loss_of, self._share = joined, loss_of, share
        self.micro_batch = micro_batch
        self._recompute = recompute
        self._loads_of = loads_of
        self._device = next(joined.parameters()).device

    def run(self, window_BT1: Tensor, begin: Callable[[], None]) -> Tensor:
        """Gradients of the mean loss of these windows into the parameters; returns that loss, without gradient.

        `begin` undoes what an attempt before left. Raises LocalFault if memory does not hold one sequence.
        """
        while (loss := self._attempted(window_BT1, begin)) is None:
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            self._halve(len(window_BT1))
        return loss

    def _attempted(self, window_BT1: Tensor, begin: Callable[[], None]) -> Tensor | None:
        """None if memory ran out: when this has returned, nothing refers to the tensors of the attempt."""
        try:
            begin()
            return self._add_up(window_BT1)
        except (RuntimeError, MemoryError) as error:
            if not self._share.is_alone or not is_out_of_memory(error):
                raise
            return None

    def _add_up(self, window_BT1: Tensor) -> Tensor:
        sequences = len(window_BT1)
        # Processes with another number of sequences must make as many passes, or they wait for each other forever.
        count = self._share.passes(sequences, self.micro_batch) if self.micro_batch else 1
        parts = torch.tensor_split(window_BT1, count)
        total = torch.zeros((), device=self._device)
        loss_of = self._with_loads(parts, sequences)
        for at, part_BT1 in enumerate(parts, 1):
            with nullcontext() if at == count else self._share.unsynced(self._joined):
                total += self._pass(loss_of, part_BT1, len(part_BT1) / sequences)
        return total

    def _pass(self, loss_of: Loss, part_BT1: Tensor, share: float) -> Tensor:
        """The part's share of the loss. The graph ends with this call; beside the next one it costs memory."""
        with narrow_products(self._device):
            loss = share * loss_of(self._joined, on_device(part_BT1, self._device))
        (loss * self._share.weight).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _with_loads(self, parts: Sequence[Tensor], sequences: int) -> Loss:
        """The loss of a part. A part that is not the whole step needs the loads of all parts first."""
        if self._loads_of is None:
            return self._loss_of
        if len(parts) == 1:
            return partial(self._loss_of, pool=self._share.mean)
        with torch.no_grad(), narrow_products(self._device):
            placed = (on_device(part, self._device) for part in parts)
            found = [self._loads_of(self._joined, part) * (len(part) / sequences) for part in placed]
        whole = self._share.mean(torch.stack(found).sum(0))
        return partial(self._loss_of, pool=lambda _: whole)

    def _halve(self, sequences: int) -> None:
        """Fewer sequences from now on, and at last less memory for one. Raises LocalFault after that."""
        before = min(self.micro_batch or sequences, sequences)
        if before > 1:
            self.micro_batch = before // 2
            log.warning("memory ran out with %d sequences at once: from now on %d", before, self.micro_batch)
        elif self._recompute():
            log.warning("memory ran out with one sequence: from now on layers are recomputed")
        else:
            raise LocalFault(
                "out of memory: it does not hold one sequence of a step",
                hint="free memory and start again; or join a run with a smaller model",
            )


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """A host's tensor on the device. A GPU copies it from pinned memory, beside the work that it has."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def narrow_products(device: torch.device) -> AbstractContextManager[None]:
    """bfloat16 products on a GPU; float32 elsewhere."""
    if device.type != "cuda":
        return nullcontext()
    # No cache of casts: it would hold those of all layers, and each weight is cast once a pass.
    return torch.autocast("cuda", torch.bfloat16, cache_enabled=False)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a device or on the host."""
    said = isinstance(error, RuntimeError) and any(text in str(error) for text in _SHORT)
    return said or isinstance(error, MemoryError)
