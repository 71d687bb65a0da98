"""The experts of one layer: SwiGLU of sorted rows, with weights that are trained here or frozen here.

A node trains the experts that it owns and needs the others only to pass values and gradients through. The
frozen ones keep nothing of a forward but their pre-activations: no weight gradient is computed and no input is
saved. They may be stored narrow (bfloat16, int8) or on the host. They are never run without gradient: what goes
down through them is part of the gradient of every layer below.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from atoll.node.model.stack import Packed, products, quantised, weight_gradients
from atoll.protocols.model import ExpertsSpec


def _through(x_PD: Tensor, counts: Sequence[int], gate_up: Packed, down: Packed) -> tuple[Tensor, Tensor]:
    """down(silu(gate x) · up x) of each row, and the pre-activations `[P, 2F]`."""
    h_P2F = products(x_PD, gate_up, counts, transposed=True)
    gate_PF, up_PF = h_P2F.chunk(2, -1)
    return products(functional.silu(gate_PF).mul_(up_PF), down, counts, transposed=True), h_P2F


def _back(dy_PD: Tensor, h_P2F: Tensor, counts: Sequence[int], down: Packed) -> tuple[Tensor, Tensor]:
    """Gradient of the pre-activations, and the activations again. Passes over memory cost as much as products
    where experts are narrow: nothing is written twice."""
    gate_PF, up_PF = h_P2F.chunk(2, -1)
    d_act_PF = products(dy_PD, down, counts, transposed=False)
    act_PF = functional.silu(gate_PF)
    dh_P2F = torch.empty_like(h_P2F)
    d_gate_PF, d_up_PF = dh_P2F.chunk(2, -1)
    torch.mul(d_act_PF, act_PF, out=d_up_PF)
    torch.ops.aten.silu_backward.grad_input(d_act_PF.mul_(up_PF), gate_PF, grad_input=d_gate_PF)
    return dh_P2F, act_PF.mul_(up_PF)


class Frozen(torch.autograd.Function):
    """Experts of others: exact values, exact gradient of the rows, nothing else."""

    @staticmethod
    def forward(ctx: Any, x_PD: Tensor, counts: Sequence[int], gate_up: Packed, down: Packed) -> Tensor:
        """Output rows `[P, D]`."""
        y_PD, h_P2F = _through(x_PD, counts, gate_up, down)
        ctx.save_for_backward(h_P2F)
        ctx.counts, ctx.gate_up, ctx.down = counts, gate_up, down
        return y_PD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_PD: Tensor) -> tuple[Tensor, None, None, None]:
        """Gradient of the rows."""
        (h_P2F,) = ctx.saved_tensors
        dh_P2F, _ = _back(dy_PD.contiguous(), h_P2F, ctx.counts, ctx.down)
        return products(dh_P2F, ctx.gate_up, ctx.counts, transposed=False), None, None, None


class Trained(torch.autograd.Function):
    """Experts of ours: saves the input and the pre-activations, computes everything between again."""

    @staticmethod
    def forward(ctx: Any, x_PD: Tensor, counts: Sequence[int], gate_up_EOD: Tensor, down_EDF: Tensor) -> Tensor:
        """Output rows `[P, D]`."""
        y_PD, h_P2F = _through(x_PD, counts, Packed(gate_up_EOD), Packed(down_EDF))
        ctx.save_for_backward(x_PD, h_P2F, gate_up_EOD, down_EDF)
        ctx.counts = counts
        return y_PD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_PD: Tensor) -> tuple[Tensor | None, None, Tensor, Tensor]:
        """Gradients of the rows and of both stacks, with the stacks' dtype."""
        x_PD, h_P2F, gate_up_EOD, down_EDF = ctx.saved_tensors
        dy_PD = dy_PD.contiguous()
        dh_P2F, act_PF = _back(dy_PD, h_P2F, ctx.counts, Packed(down_EDF))
        d_down = weight_gradients(dy_PD, act_PF, ctx.counts).to(down_EDF.dtype)
        d_gate_up = weight_gradients(dh_P2F, x_PD, ctx.counts).to(gate_up_EOD.dtype)
        return products(dh_P2F, Packed(gate_up_EOD), ctx.counts, transposed=False), None, d_gate_up, d_down


class Shelf(nn.Module):
    """Stacks that no optimiser sees, left out of `state_dict`; on the host they do not follow `.to(device)`."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, on_host: bool) -> None:
        super().__init__()
        self._kept: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            self._keep(name, torch.empty(shape, dtype=dtype), on_host)
            if dtype == torch.int8:
                self._keep(f"{name}_scale", torch.empty((*shape[:-1], 1)), on_host)

    def packed(self, name: str) -> Packed:
        """One stack."""
        return Packed(self._found(name), self._found(f"{name}_scale"))  # type: ignore[arg-type]

    def _keep(self, name: str, value: Tensor, on_host: bool) -> None:
        if on_host:
            self._kept[name] = value.pin_memory() if torch.cuda.is_available() else value
        else:
            self.register_buffer(name, value, persistent=False)

    def _found(self, name: str) -> Tensor | None:
        return self._kept.get(name, dict(self.named_buffers()).get(name))


class Place(NamedTuple):
    """Where the values of one expert's projection lie."""

    values: Tensor
    scale: Tensor | None

    def write(self, matrix: Tensor) -> None:
        """Copy a matrix here, converting dtype and device; int8 with the scale of each row."""
        if self.scale is None:
            self.values.copy_(matrix)
            return
        values, scale = quantised(matrix)
        self.values.copy_(values)
        self.scale.copy_(scale)


class Experts(nn.Module):
    """All experts of a layer. Order in memory: those that are trained here, then the frozen ones."""

    def __init__(
        self, dim: int, experts: ExpertsSpec, owned: frozenset[int], frozen_dtype: torch.dtype, on_host: bool
    ) -> None:
        super().__init__()
        self.width = experts.ffn
        self.owned = tuple(sorted(owned))
        self.frozen = tuple(e for e in range(experts.count) if e not in owned)
        wide, narrow = 2 * experts.ffn, experts.ffn
        if self.owned:
            self.gate_up = nn.Parameter(torch.empty(len(self.owned), wide, dim))
            self.down = nn.Parameter(torch.empty(len(self.owned), dim, narrow))
        shapes = {"gate_up": (len(self.frozen), wide, dim), "down": (len(self.frozen), dim, narrow)}
        self.shelf = Shelf(shapes, frozen_dtype, on_host) if self.frozen else None

    def forward(self, x_PD: Tensor, counts: Sequence[int]) -> Tensor:
        """Output rows; `x_PD` is sorted in the order of memory and `counts` has one number for each expert."""
        ours, theirs = counts[: len(self.owned)], counts[len(self.owned) :]
        x_OD, x_FD = x_PD.split_with_sizes([sum(ours), sum(theirs)]) if ours and theirs else (x_PD, x_PD)
        parts: list[Tensor] = []
        if self.owned:
            parts.append(Trained.apply(x_OD, ours, self.gate_up, self.down))  # type: ignore[no-untyped-call]
        if self.shelf is not None:
            stacks = self.shelf.packed("gate_up"), self.shelf.packed("down")
            parts.append(Frozen.apply(x_FD, theirs, *stacks))  # type: ignore[no-untyped-call]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def places(self) -> Iterator[tuple[str, Place]]:
        """`3.gate_proj.weight` and so on: views into the stacks."""
        if self.owned:
            ours = Packed(self.gate_up.detach()), Packed(self.down.detach())
            yield from self.split(self.owned, *ours)
        if self.shelf is not None:
            yield from self.split(self.frozen, self.shelf.packed("gate_up"), self.shelf.packed("down"))

    def split(self, ids: Sequence[int], gate_up: Packed, down: Packed) -> Iterator[tuple[str, Place]]:
        """Any pair of stacks with these shapes as views by name: weights, gradients or moments."""
        for at, expert in enumerate(ids):
            yield f"{expert}.gate_proj.weight", _place(gate_up, at, slice(0, self.width))
            yield f"{expert}.up_proj.weight", _place(gate_up, at, slice(self.width, None))
            yield f"{expert}.down_proj.weight", _place(down, at, slice(None))


def _place(stack: Packed, at: int, rows: slice) -> Place:
    scale = None if stack.scale_EO1 is None else stack.scale_EO1[at, rows]
    return Place(stack.values_EOI[at, rows], scale)
