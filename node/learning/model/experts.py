"""The experts of one layer: SwiGLU of sorted rows, with experts that are trained here and frozen ones.

A node trains the experts that it owns; values and gradients only pass through the others. Frozen experts save
only their pre-activations of a forward: no weight gradient is computed and no input is saved. They may be stored
narrow (bfloat16, int8) or on the host. They always pass gradients, which the layers below need.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from atoll.node.learning.model.expert_functions import (
    ExpertsFunction,
    GroupedExpertsFunction,
    Packed,
    quantise,
)
from atoll.protocols.errors import ConfigError
from atoll.protocols.run.model_spec import ExpertsSpec


class FrozenStacks(nn.Module):
    """Stacks without gradient, left out of `state_dict`; stacks on the host do not follow `.to(device)`."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, on_host: bool) -> None:
        super().__init__()
        self._host: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            self._add(name, torch.empty(shape, dtype=dtype), on_host)
            if dtype == torch.int8:
                self._add(f"{name}_scale", torch.empty((*shape[:-1], 1)), on_host)

    def packed(self, name: str) -> Packed:
        """The stack `name`, with its scales if it is int8."""
        return Packed(self._found(name), self._found(f"{name}_scale"))  # type: ignore[arg-type]

    def on_host(self) -> Iterator[Tensor]:
        """The tensors on the host, which are no buffers because they must not move."""
        yield from self._host.values()

    def _add(self, name: str, value: Tensor, on_host: bool) -> None:
        if on_host:
            self._host[name] = value.pin_memory() if torch.cuda.is_available() else value
        else:
            self.register_buffer(name, value, persistent=False)

    def _found(self, name: str) -> Tensor | None:
        return self._host.get(name, dict(self.named_buffers()).get(name))


class ProjectionPlace(NamedTuple):
    """Views of one expert's projection: its values, and for int8 the scale of each row."""

    values: Tensor
    scale: Tensor | None

    def write(self, matrix: Tensor) -> None:
        """Copy a matrix here, converting dtype and device; int8 gets the scale of each row."""
        if self.scale is None:
            self.values.copy_(matrix)
            return
        values, scale = quantise(matrix)
        self.values.copy_(values)
        self.scale.copy_(scale)


class Experts(nn.Module):
    """All experts of a layer; in memory the trained ones come first, then the frozen ones."""

    def __init__(
        self, dim: int, experts: ExpertsSpec, owned: frozenset[int], frozen_dtype: torch.dtype, on_host: bool
    ) -> None:
        super().__init__()
        if not owned <= set(range(experts.count)):
            raise ConfigError(f"experts {sorted(owned)} are not all within 0 … {experts.count - 1}")
        self.width = experts.ffn
        self.owned = tuple(sorted(owned))
        self.frozen = tuple(e for e in range(experts.count) if e not in owned)
        wide, narrow = 2 * experts.ffn, experts.ffn
        if self.owned:
            self.gate_up = nn.Parameter(torch.empty(len(self.owned), wide, dim))
            self.down = nn.Parameter(torch.empty(len(self.owned), dim, narrow))
        shapes = {"gate_up": (len(self.frozen), wide, dim), "down": (len(self.frozen), dim, narrow)}
        self.shelf = FrozenStacks(shapes, frozen_dtype, on_host) if self.frozen else None

    def forward(self, x_PD: Tensor, counts: Sequence[int]) -> Tensor:
        """Output rows `[P, D]`. Rows are sorted by expert in memory order; `counts` has the rows of each."""
        frozen = None if self.shelf is None else (self.shelf.packed("gate_up"), self.shelf.packed("down"))
        owned_pair = (self.gate_up, self.down) if self.owned else ()
        y_PD: Tensor = ExpertsFunction.apply(x_PD, counts, frozen, *owned_pair)  # type: ignore[no-untyped-call]
        return y_PD

    def grouped(self, x_PD: Tensor, end_E: Tensor) -> Tensor:
        """As `forward`, with the ends of the experts' rows on their device; see GroupedExpertsFunction."""
        frozen = None if self.shelf is None else (self.shelf.packed("gate_up"), self.shelf.packed("down"))
        owned_pair = (self.gate_up, self.down) if self.owned else ()
        y_PD: Tensor = GroupedExpertsFunction.apply(x_PD, end_E, frozen, *owned_pair)  # type: ignore[no-untyped-call]
        return y_PD

    def places(self) -> Iterator[tuple[str, ProjectionPlace]]:
        """Names such as `3.gate_proj.weight`, and views into the stacks."""
        if self.owned:
            ours = Packed(self.gate_up.detach()), Packed(self.down.detach())
            yield from self.split(self.owned, *ours)
        if self.shelf is not None:
            yield from self.split(self.frozen, self.shelf.packed("gate_up"), self.shelf.packed("down"))

    def split(self, ids: Sequence[int], gate_up: Packed, down: Packed) -> Iterator[tuple[str, ProjectionPlace]]:
        """Names and views of a pair of stacks with these shapes: weights, gradients or moments."""
        for at, expert in enumerate(ids):
            yield f"{expert}.gate_proj.weight", _place(gate_up, at, slice(0, self.width))
            yield f"{expert}.up_proj.weight", _place(gate_up, at, slice(self.width, None))
            yield f"{expert}.down_proj.weight", _place(down, at, slice(None))


def _place(stack: Packed, at: int, rows: slice) -> ProjectionPlace:
    scale = None if stack.scale_EO1 is None else stack.scale_EO1[at, rows]
    return ProjectionPlace(stack.values_EOI[at, rows], scale)
