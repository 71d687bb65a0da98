"""Autograd functions of the experts of one layer: SwiGLU of rows that are sorted by expert.

The weights of several experts are one array, which is multiplied with sorted rows. Rows of `x_PI` are sorted by
expert; `counts` has the number of rows of each. Autograd sees nothing of it.

An accelerator is never asked how many rows an expert has: in each layer the host would wait for the device, and
then the device for the host. So there one product has all experts, and finds the rows of each by ends that stay on
the device; its input is saved whole (`GroupedExpertsFunction`).

Letters: P rows (token and chosen expert), E experts of the stack, O and I width out of and into a projection.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

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

    Expert by expert: a whole stack in float32 would lose what narrow storage saves.
    """
    for expert, rows in _spans(counts):
        matrix = stack.one(expert, x_PI)
        torch.mm(x_PI[rows], matrix.mT if transposed else matrix, out=out[rows])


def weight_gradients(dy_PO: Tensor, x_PI: Tensor, counts: Sequence[int]) -> Tensor:
    """dyᵀ x of each expert's rows, `[E, O, I]`; zero for an expert without rows."""
    out_EOI = x_PI.new_zeros((len(counts), dy_PO.shape[1], x_PI.shape[1]))
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
        d_act_PF = dy_PD.new_empty((len(h_P2F), h_P2F.shape[1] // 2))
        for side in sides:
            products(dy_PD[side.rows], side.down, side.counts, d_act_PF[side.rows], transposed=False)
        dh_P2F, act_PF = _back(d_act_PF, h_P2F)
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


class GroupedExpertsFunction(torch.autograd.Function):
    """As ExpertsFunction, with the ends of the experts' rows where the rows are: nothing waits for the device.

    Rows from the last end on belong to no expert: what it returns for them is undefined, their gradient is zero.
    """

    @staticmethod
    def forward(ctx: Any, x_PD: Tensor, end_E: Tensor, frozen: Pair | None, *owned_pair: Tensor) -> Tensor:
        """Output rows `[P, D]`; `end_E`: int32, the row behind the last one of each expert, in memory order."""
        gate_up, down = _joined(owned_pair, frozen, x_PD)
        h_P2F = functional.grouped_mm(x_PD, gate_up.mT, offs=end_E)
        gate_PF, up_PF = h_P2F.chunk(2, -1)
        y_PD = functional.grouped_mm(functional.silu(gate_PF).mul_(up_PF), down.mT, offs=end_E)
        # Which rows are those of owned experts only the device knows, so it saves all of them.
        ctx.save_for_backward(h_P2F, end_E, *((x_PD, *owned_pair) if owned_pair else ()))
        ctx.frozen = frozen
        return y_PD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_PD: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the rows and of the trained stacks."""
        h_P2F, end_E, *saved = ctx.saved_tensors
        dy_PD = dy_PD.contiguous()
        gate_up, down = _joined(saved[1:], ctx.frozen, dy_PD)
        dh_P2F, act_PF = _back(functional.grouped_mm(dy_PD, down, offs=end_E), h_P2F)
        dx_PD = functional.grouped_mm(dh_P2F, gate_up, offs=end_E)
        is_real_P1 = torch.arange(len(dx_PD), device=dx_PD.device)[:, None] < end_E[-1]
        dx_PD = torch.where(is_real_P1, dx_PD, 0)
        if not saved:
            return dx_PD, None, None
        x_PD, owned_gate_up, owned_down = saved
        ours_O = end_E[: len(owned_down)]
        d_gate_up = functional.grouped_mm(dh_P2F.mT, x_PD, offs=ours_O).to(owned_gate_up.dtype)
        d_down = functional.grouped_mm(dy_PD.mT, act_PF, offs=ours_O).to(owned_down.dtype)
        return dx_PD, None, None, d_gate_up, d_down


def _joined(owned_pair: Sequence[Tensor], frozen: Pair | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """Both stacks of all experts, the owned ones first, with the dtype and device of `like`."""
    owned = [Packed(values) for values in owned_pair]
    kinds = zip(*(pair for pair in (owned, frozen) if pair), strict=True)
    gate_up, down = (_one([stack.whole(like) for stack in stacks]) for stacks in kinds)
    return gate_up, down


def _one(stacks: Sequence[Tensor]) -> Tensor:
    return stacks[0] if len(stacks) == 1 else torch.cat(list(stacks))


def _back(d_act_PF: Tensor, h_P2F: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of the pre-activations `[P, 2F]`, and the recomputed activations `[P, F]`. `d_act_PF` is used up.

    For narrow experts a pass over memory costs as much as a product, so nothing is written twice.
    """
    gate_PF, up_PF = h_P2F.chunk(2, -1)
    act_PF = functional.silu(gate_PF)
    dh_P2F = torch.empty_like(h_P2F)
    d_gate_PF, d_up_PF = dh_P2F.chunk(2, -1)
    torch.mul(d_act_PF, act_PF, out=d_up_PF)
    torch.ops.aten.silu_backward.grad_input(d_act_PF.mul_(up_PF), gate_PF, grad_input=d_gate_PF)
    return dh_P2F, act_PF.mul_(up_PF)


def _part(x_PD: Tensor, rows: slice) -> Tensor:
    return x_PD if rows.stop == len(x_PD) else x_PD[rows].clone()
