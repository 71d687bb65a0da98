"""What a rule of the error feedback has beside e, and what its caller gives it. `ef`, which is today's e alone, is
no rule here: the encoder adds β·e itself.

All values are rounded after each operation, in the order of the code: a fused multiply-add would make payloads
differ from device to device.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from atoll.node.learning.kernels.compiled import untouched_zeros
from atoll.protocols.errors import CorruptFault
from atoll.protocols.run.arena import Span

Encode = Callable[[Tensor], None]
"""Encodes a float32 `[N, 4096]`, which becomes what was not sent."""
MEMORY = "memory/"
"""How the names of these tensors begin in a generation."""
_SLAB_CHUNKS = 128
_VALUES, _ROUNDS = MEMORY + "values", MEMORY + "rounds"


def load_rows(into_C4096: Tensor, saved_C4096: Tensor) -> None:
    """Copy a saved array into zeros. Rows that are zero, of experts never trained here, take no memory."""
    for at in range(0, len(saved_C4096), _SLAB_CHUNKS):
        rows = slice(at, at + _SLAB_CHUNKS)
        if bool(saved_C4096[rows].any()):
            into_C4096[rows] = saved_C4096[rows]


def _is_finite(values_C4096: Tensor) -> bool:
    """By slabs, so that no mask as large as the array is made."""
    return all(bool(part.isfinite().all()) for part in torch.split(values_C4096, _SLAB_CHUNKS))


class Returned(NamedTuple):
    """What becomes of a value of a payload that missed its final set, by chunk, float32 `[N]`."""

    to_error: Tensor
    """Share of it that e has again."""
    from_memory: Tensor
    """Share of it that the memory has no longer."""


class FeedbackRule(Protocol):
    """A rule of one run on one node."""

    @property
    def memory(self) -> "Memory | None":
        """What it keeps beside e; None: nothing."""

    def send(self, number: int, span: Span, error_N4096: Tensor, delta_N4096: Tensor, encode: Encode) -> None:
        """Encode one slab of round `number`; e and memory become what they are after it. `delta` may change."""

    def most_norm(self, number: int, values: int) -> float:
        """Largest norm of a pseudo-gradient of so many values; what is longer is shortened before `send`."""

    def returned(self, number: int, chunks: int) -> Returned:
        """Shares of all chunks for a payload of round `number`."""


class Memory:
    """One more array, float32 `[C, 4096]`, and the round in which each chunk was sent last."""

    def __init__(self, chunks: int, device: torch.device) -> None:
        self.values_C4096 = untouched_zeros(chunks, device)
        self.round_C = torch.full((chunks,), -1, dtype=torch.int64)
        """−1: never."""

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint, without copies."""
        return {_VALUES: self.values_C4096, _ROUNDS: self.round_C}

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise CorruptFault for a memory that nobody saved. A state that has none is one of a checkpoint."""
        values, rounds = tensors.get(_VALUES), tensors.get(_ROUNDS)
        if values is None and rounds is None:
            return
        if values is None or rounds is None or rounds.dtype != torch.int64:
            raise CorruptFault("half of the memory of the error feedback is missing")
        if (values.shape, rounds.shape) != (self.values_C4096.shape, self.round_C.shape) or not _is_finite(values):
            raise CorruptFault("the saved memory of the error feedback is of another shape or not finite")

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `tensors` gave; without it, begin anew."""
        self.drop()
        if _VALUES in tensors:
            load_rows(self.values_C4096, tensors[_VALUES])
            self.round_C.copy_(tensors[_ROUNDS])

    def drop(self) -> None:
        """Begin anew."""
        self.values_C4096 = untouched_zeros(len(self.values_C4096), self.values_C4096.device)
        self.round_C.fill_(-1)
