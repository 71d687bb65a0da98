"""What a model other than the decoder is to a run. A package that brings one implements `PluggedModel`.

Letters: B examples, X bytes of one example.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:  # making a run needs the numbers alone, and no torch
    from torch import Tensor, nn


class PluggedModel(Protocol):
    """A module, its loss and its examples. All members get the same from it, whatever their machine is."""

    context: int
    """X: bytes of one example."""
    saved: int
    """Most values, float32, that a step holds for one example, beside weights and gradients."""
    starts: dict[str, tuple[tuple[int, ...], int]]
    """Shape and `TensorSpec.start` of each parameter by name, in the order of the state."""

    def examples(self) -> tuple[bytes, bytes]:
        """Examples for training and for validation, X bytes each, end to end; the same bytes on every machine."""
        ...

    def build(self) -> nn.Module:
        """The module: float32 parameters of these names and shapes, no buffers, nothing that is random."""
        ...

    def loss(self, module: nn.Module, example_BX: Tensor) -> Tensor:
        """The mean loss `[]` of examples, int64 0 … 255 on the module's device; it calls `module` itself."""
        ...


Factory: TypeAlias = Callable[[], PluggedModel]
"""Makes the model of an entry point."""
