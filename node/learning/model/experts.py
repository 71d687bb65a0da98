"""The experts of one layer: SwiGLU of sorted rows, with experts that are trained here and frozen ones.

A node trains the experts that it owns; values and gradients only pass through the others. Frozen experts save
only their pre-activations of a forward: no weight gradient is computed and no input is saved. They may be stored
narrow (bfloat16, int8) or on the host. They always pass gradients, which the layers below need.

The weights of several experts are one array, which is multiplied with sorted rows. Rows of `x_PI` are sorted by
expert; `counts` has the number of rows of each. Autograd sees nothing of it.

Letters: P rows (token and chosen expert), E experts of the stack, O and I width out of and into a projection.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from atoll.protocols.errors import ConfigError
from atoll.protocols.run.model_spec import ExpertsSpec

_ALIGN_BYTES = 16
"""Alignment of every row that `grouped_mm` needs."""
_INT8_MAX = 127


class Packed(NamedTuple):
    """A stack `[E, O, I]`: float of any width, or int8 with a float32 scale per row."""

    values_EOI: Tensor
    scale_EO1: Tensor | None = None

    def one(self, expert: int, like: Tensor) -> Tensor:
        """One expert's matrix `[O, I]` with the dtype and device of `like`, without a copy if it has them."""
        values = self.values_EOI[expert].to(like)
        return values if self.scale_EO1 is None else values * self.scale_EO1[expert].to(like)

    def whole(self, like: Tensor) -> Tensor:
        """The stack `[E, O, I]` with the dtype and device of `like`, without a copy if it has them."""
        values = self.values_EOI.to(like.device, like.dtype, non_blocking=True)
        return values if self.scale_EO1 is None else values * self.scale_EO1.to(like)


def quantise(matrix_OI: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values `[O, I]` and float32 scales `[O, 1]`; the largest value of a row becomes ±127."""
    scale_O1 = matrix_OI.float().abs().amax(-1, keepdim=True) / _INT8_MAX
    safe_O1 = torch.where(scale_O1 > 0, scale_O1, 1.0)
    return (matrix_OI.float() / safe_O1).round().to(torch.int8), scale_O1


def products(x_PI: Tensor, stack: Packed, counts: Sequence[int], out: Tensor, *, transposed: bool) -> None:
    """Write x Wᵀ (`transposed`, the forward) or x W (the backward) into `out`, each row with its expert's W.

    An accelerator converts and multiplies a whole stack at once. A CPU goes expert by expert: its grouped product
    does the same but cannot write into a slice, and a whole stack in float32 would lose what narrow storage saves.
    """
    if uses_grouped_product(x_PI, *stack.values_EOI.shape[1:]):
        whole_EOI = stack.whole(x_PI)
        out.copy_(functional.grouped_mm(x_PI, whole_EOI.mT if transposed else whole_EOI, offs=_ends(x_PI, counts)))
        return
    for expert, rows in _spans(counts):
        matrix = stack.one(expert, x_PI)
        torch.mm(x_PI[rows], matrix.mT if transposed else matrix, out=out[rows])


def weight_gradients(dy_PO: Tensor, x_PI: Tensor, counts: Sequence[int]) -> Tensor:
    """dyᵀ x of each expert's rows, `[E, O, I]`; zero for an expert without rows."""
    wide, narrow = dy_PO.shape[1], x_PI.shape[1]
    if uses_grouped_product(x_PI, wide, narrow):
        return functional.grouped_mm(dy_PO.mT, x_PI, offs=_ends(x_PI, counts))
    out_EOI = x_PI.new_zeros((len(counts), wide, narrow))
    for expert, rows in _spans(counts):
        torch.mm(dy_PO[rows].mT, x_PI[rows], out=out_EOI[expert])
    return out_EOI


def uses_grouped_product(like: Tensor, *widths: int) -> bool:
    """Whether one grouped product is used: on an accelerator, for aligned rows of at most 4 bytes a value."""
    fits = like.itemsize <= 4 and all((width * like.itemsize) % _ALIGN_BYTES == 0 for width in widths)
    return like.is_cuda and len(like) > 0 and fits


def _spans(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Experts that have rows, with the slice of these rows."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count


def _ends(like: Tensor, counts: Sequence[int]) -> Tensor:
    return torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(like.device)


class StackRows(NamedTuple):
    """The owned or the frozen experts: their stacks, the rows of each expert, and the slice of all these rows."""

    gate_up: Packed
    down: Packed
    counts: Sequence[int]
    rows: slice


Pair = tuple[Packed, Packed]
"""The stacks of gate and up, and of down."""


class ExpertsFunction(torch.autograd.Function):
    """down(silu(gate x) · up x) of sorted rows. Owned and frozen experts write into one array.

    It saves the pre-activations of all rows and the input of the owned experts' rows.
    """

    @staticmethod
    def forward(ctx: Any, x_PD: Tensor, counts: Sequence[int], frozen: Pair | None, *owned_pair: Tensor) -> Tensor:
        """Output rows `[P, D]`; `owned_pair` has both trained stacks, or is empty."""
        sides = _sides(counts, owned_pair, frozen)
        h_P2F = x_PD.new_empty((len(x_PD), sides[0].gate_up.values_EOI.shape[1]))
        for side in sides:
            products(x_PD[side.rows], side.gate_up, side.counts, h_P2F[side.rows], transposed=True)
        gate_PF, up_PF = h_P2F.chunk(2, -1)
        act_PF = functional.silu(gate_PF).mul_(up_PF)
        y_PD = torch.empty_like(x_PD)
        for side in sides:
            products(act_PF[side.rows], side.down, side.counts, y_PD[side.rows], transposed=True)
        # A view would keep the rows of the frozen experts alive with it.
        saved = [_part(x_PD, sides[0].rows)] if owned_pair else []
        ctx.save_for_backward(h_P2F, *saved, *owned_pair)
        ctx.counts, ctx.frozen = counts, frozen
        return y_PD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_PD: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the rows and of the trained stacks."""
        h_P2F, *saved = ctx.saved_tensors
        sides = _sides(ctx.counts, tuple(saved[1:]), ctx.frozen)
        dy_PD = dy_PD.contiguous()
        dh_P2F, act_PF = _back(dy_PD, h_P2F, sides)
        dx_PD = torch.empty_like(dy_PD)
        for side in sides:
            products(dh_P2F[side.rows], side.gate_up, side.counts, dx_PD[side.rows], transposed=False)
        if not saved:
            return dx_PD, None, None
        x_OD, gate_up, down = saved
        ours, rows = sides[0].counts, sides[0].rows
        d_gate_up = weight_gradients(dh_P2F[rows], x_OD, ours).to(gate_up.dtype)
        d_down = weight_gradients(dy_PD[rows], act_PF[rows], ours).to(down.dtype)
        return dx_PD, None, None, d_gate_up, d_down


def _sides(counts: Sequence[int], owned_pair: Sequence[Tensor], frozen: Pair | None) -> list[StackRows]:
    """The owned experts, then the frozen ones, in the order of the rows."""
    number = len(owned_pair[0]) if owned_pair else 0
    at = sum(counts[:number])
    found = []
    if owned_pair:
        found.append(StackRows(Packed(owned_pair[0]), Packed(owned_pair[1]), counts[:number], slice(0, at)))
    if frozen is not None:
        found.append(StackRows(*frozen, counts[number:], slice(at, None)))
    return found


def _back(dy_PD: Tensor, h_P2F: Tensor, sides: Sequence[StackRows]) -> tuple[Tensor, Tensor]:
    """Gradient of the pre-activations `[P, 2F]`, and the recomputed activations `[P, F]`.

    For narrow experts a pass over memory costs as much as a product, so nothing is written twice.
    """
    gate_PF, up_PF = h_P2F.chunk(2, -1)
    d_act_PF = dy_PD.new_empty(gate_PF.shape)
    for side in sides:
        products(dy_PD[side.rows], side.down, side.counts, d_act_PF[side.rows], transposed=False)
    act_PF = functional.silu(gate_PF)
    dh_P2F = torch.empty_like(h_P2F)
    d_gate_PF, d_up_PF = dh_P2F.chunk(2, -1)
    torch.mul(d_act_PF, act_PF, out=d_up_PF)
    torch.ops.aten.silu_backward.grad_input(d_act_PF.mul_(up_PF), gate_PF, grad_input=d_gate_PF)
    return dh_P2F, act_PF.mul_(up_PF)


def _part(x_PD: Tensor, rows: slice) -> Tensor:
    return x_PD if rows.stop == len(x_PD) else x_PD[rows].clone()


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
