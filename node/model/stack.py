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

    def ready(self, like: Tensor) -> bool:
        """Whether it can be multiplied as it is."""
        return (self.values_EOI.dtype, self.values_EOI.device) == (like.dtype, like.device)


def quantised(matrix_OI: Tensor) -> tuple[Tensor, Tensor]:
    """int8 and the scale of each row `[O, 1]`: the largest value of a row becomes ±127."""
    scale_O1 = matrix_OI.float().abs().amax(-1, keepdim=True) / _INT8_MAX
    safe_O1 = torch.where(scale_O1 > 0, scale_O1, 1.0)
    return (matrix_OI.float() / safe_O1).round().to(torch.int8), scale_O1


def products(x_PI: Tensor, stack: Packed, counts: Sequence[int], *, transposed: bool) -> Tensor:
    """x Wᵀ (`transposed`, the forward direction) or x W (the backward one), each row with its expert's W.

    One grouped product where the stack can be used as it is. On a CPU other stacks are converted one expert at
    a time: a whole copy in float32 would undo what the narrow format saves. An accelerator converts all at once.
    """
    if not _groupable(x_PI, *stack.values_EOI.shape[1:]) or not (stack.ready(x_PI) or x_PI.is_cuda):
        return _one_by_one(x_PI, stack, counts, transposed)
    whole_EOI = stack.whole(x_PI)
    return functional.grouped_mm(x_PI, whole_EOI.mT if transposed else whole_EOI, offs=_ends(x_PI, counts))


def weight_gradients(dy_PO: Tensor, x_PI: Tensor, counts: Sequence[int]) -> Tensor:
    """dyᵀ x of each expert's rows `[E, O, I]`; zero where an expert got none."""
    wide, narrow = dy_PO.shape[1], x_PI.shape[1]
    if _groupable(x_PI, wide, narrow):
        return functional.grouped_mm(dy_PO.mT, x_PI, offs=_ends(x_PI, counts))
    out_EOI = x_PI.new_zeros((len(counts), wide, narrow))
    for expert, rows in _spans(counts):
        torch.mm(dy_PO[rows].mT, x_PI[rows], out=out_EOI[expert])
    return out_EOI


def _one_by_one(x_PI: Tensor, stack: Packed, counts: Sequence[int], transposed: bool) -> Tensor:
    _, wide, narrow = stack.values_EOI.shape
    out = x_PI.new_empty((len(x_PI), wide if transposed else narrow))
    for expert, rows in _spans(counts):
        matrix = stack.one(expert, x_PI)
        torch.mm(x_PI[rows], matrix.mT if transposed else matrix, out=out[rows])
    return out


def _spans(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Experts that have rows, with them."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count


def _ends(like: Tensor, counts: Sequence[int]) -> Tensor:
    return torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(like.device)


def _groupable(like: Tensor, *widths: int) -> bool:
    """Whether `grouped_mm` takes rows of these widths: aligned, and of no dtype wider than float32."""
    return like.itemsize <= 4 and all((width * like.itemsize) % _ALIGN_BYTES == 0 for width in widths)
