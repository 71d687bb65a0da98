"""The weights of several experts as one array, and the products of sorted rows with them.

Rows of `x_PI` are sorted by expert; `counts` has the number of rows of each. Autograd sees nothing of it.

Letters: P rows (token and chosen expert), E experts of the stack, O and I width out of and into a projection.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
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
