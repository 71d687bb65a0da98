"""Weights of several experts as one array, and the products of sorted rows with them.

Rows of `x_PI` are sorted by expert; `counts` says how many belong to each. Nothing here is seen by autograd.

Letters: P rows (token and chosen expert), E experts of the stack, O and I width out of and into a projection.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

_ALIGN_BYTES = 16
"""What `grouped_mm` wants of every row."""
_INT8_MAX = 127


class Packed(NamedTuple):
    """A stack `[E, O, I]`: float of any width, or int8 with a float32 scale per row."""

    values_EOI: Tensor
    scale_EO1: Tensor | None = None

    def one(self, expert: int, like: Tensor) -> Tensor:
        """One expert's matrix with the dtype and device of `like`; itself where it has them already."""
        values = self.values_EOI[expert].to(like)
        return values if self.scale_EO1 is None else values * self.scale_EO1[expert].to(like)

    def whole(self, like: Tensor) -> Tensor:
        """The stack with the dtype and device of `like`; itself where it has them already."""
        values = self.values_EOI.to(like.device, like.dtype, non_blocking=True)
        return values if self.scale_EO1 is None else values * self.scale_EO1.to(like)


def quantised(matrix_OI: Tensor) -> tuple[Tensor, Tensor]:
    """int8 and the scale of each row `[O, 1]`: the largest value of a row becomes ±127."""
    scale_O1 = matrix_OI.float().abs().amax(-1, keepdim=True) / _INT8_MAX
    safe_O1 = torch.where(scale_O1 > 0, scale_O1, 1.0)
    return (matrix_OI.float() / safe_O1).round().to(torch.int8), scale_O1


def products(x_PI: Tensor, stack: Packed, counts: Sequence[int], out: Tensor, *, transposed: bool) -> None:
    """x Wᵀ (`transposed`, the forward direction) or x W (the backward one) into `out`, each row with its W.

    An accelerator widens and multiplies a whole stack at once. A CPU goes from expert to expert: its grouped
    product does the same but cannot write into a slice, and a whole stack in float32 would undo what a narrow one
    saves.
    """
    if grouped(x_PI, *stack.values_EOI.shape[1:]):
        whole_EOI = stack.whole(x_PI)
        out.copy_(functional.grouped_mm(x_PI, whole_EOI.mT if transposed else whole_EOI, offs=_ends(x_PI, counts)))
        return
    for expert, rows in _spans(counts):
        matrix = stack.one(expert, x_PI)
        torch.mm(x_PI[rows], matrix.mT if transposed else matrix, out=out[rows])


def weight_gradients(dy_PO: Tensor, x_PI: Tensor, counts: Sequence[int]) -> Tensor:
    """dyᵀ x of each expert's rows `[E, O, I]`; zero where an expert got none."""
    wide, narrow = dy_PO.shape[1], x_PI.shape[1]
    if grouped(x_PI, wide, narrow):
        return functional.grouped_mm(dy_PO.mT, x_PI, offs=_ends(x_PI, counts))
    out_EOI = x_PI.new_zeros((len(counts), wide, narrow))
    for expert, rows in _spans(counts):
        torch.mm(dy_PO[rows].mT, x_PI[rows], out=out_EOI[expert])
    return out_EOI


def grouped(like: Tensor, *widths: int) -> bool:
    """Whether one grouped product is the way: on an accelerator, with any rows, aligned, no wider than float32."""
    fits = like.itemsize <= 4 and all((width * like.itemsize) % _ALIGN_BYTES == 0 for width in widths)
    return like.is_cuda and len(like) > 0 and fits


def _spans(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Experts that have rows, with them."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count


def _ends(like: Tensor, counts: Sequence[int]) -> Tensor:
    return torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(like.device)
