"""Copies between named tensors and rows of the arena's `[C, 4096]` array, exactly, for any dtype and device.

Rows are copied directly between the tensors and a range of chunks, so a caller can go through a model by slabs and
needs no second copy of it. Padding is zero.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from operator import attrgetter

import torch
from torch import Tensor

from atoll.protocols.run.arena import CHUNK, SIDE, Arena, Placement


def read_rows(named: Mapping[str, Tensor], arena: Arena, start: int, rows_N4096: Tensor) -> None:
    """Fill `rows_N4096` with chunks `start … start + N − 1` of the tensors, converting dtype and device."""
    rows_N4096.zero_()
    for row_values, values in _views(named, arena, start, rows_N4096):
        row_values.copy_(values)


def write_rows(named: Mapping[str, Tensor], arena: Arena, start: int, rows_N4096: Tensor) -> None:
    """Copy chunks `start … start + N − 1` into the tensors, converting dtype and device."""
    for row_values, values in _views(named, arena, start, rows_N4096):
        values.copy_(row_values)


def gather(named: Mapping[str, Tensor], arena: Arena) -> Tensor:
    """All atoms as one array `[C, 4096]` in the arena's order, with the tensors' dtype and device."""
    first = next(iter(named.values()))
    out_C4096 = torch.empty((arena.chunks, CHUNK), dtype=first.dtype, device=first.device)
    read_rows(named, arena, 0, out_C4096)
    return out_C4096


def _views(
    named: Mapping[str, Tensor], arena: Arena, start: int, rows_N4096: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of equally shaped views, (part of the rows, part of an atom), that cover all values but padding."""
    for place in _within(arena, start, start + len(rows_N4096)):
        value = named[place.name].detach()
        if len(place.shape) == 2:
            yield from _matrix_views(value, place, start, rows_N4096)
        else:
            yield from _vector_views(value, place, start, rows_N4096)


def _within(arena: Arena, start: int, stop: int) -> tuple[Placement, ...]:
    """Placements that chunks `start … stop - 1` may hold, by bisection: a mixture has thousands of placements.

    First chunks are in rising order, and all vectors have the same one.
    """
    table, first = arena.placements, attrgetter("first_chunk")
    before = table[max(0, bisect_right(table, start, key=first) - 1)]
    return table[bisect_left(table, before.first_chunk, key=first) : bisect_left(table, stop, key=first)]


def _vector_views(
    value: Tensor, place: Placement, start: int, rows_N4096: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    at = (place.first_chunk - start) * CHUNK + place.offset
    low, high = max(at, 0), min(at + len(value), rows_N4096.numel())
    if low < high:
        yield rows_N4096.view(-1)[low:high], value[low - at : high - at]


def _matrix_views(
    value: Tensor, place: Placement, start: int, rows_N4096: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Views by rectangles of blocks, `[blocks down, height, blocks across, width]`, cut at the edges."""
    first = max(0, start - place.first_chunk)
    last = min(place.blocks[0] * place.blocks[1], start + len(rows_N4096) - place.first_chunk)
    for at, row, col, down, across in _rectangles(first, last, place.blocks[1]):
        begin = place.first_chunk + at - start
        blocks = rows_N4096[begin : begin + down * across].view(down, across, SIDE, SIDE).transpose(1, 2)
        part = value[row * SIDE : (row + down) * SIDE, col * SIDE : (col + across) * SIDE]
        for y, rows, height in _cuts(part.shape[0]):
            band = torch.unflatten(part[y * SIDE : y * SIDE + rows * height], 0, (rows, height))
            for x, cols, width in _cuts(part.shape[1]):
                inside = torch.unflatten(band[:, :, x * SIDE : x * SIDE + cols * width], 2, (cols, width))
                yield blocks[y : y + rows, :height, x : x + cols, :width], inside


def _rectangles(first: int, last: int, width: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Blocks `first … last − 1`, `width` a row, as at most three (first, row, column, rows, columns)."""
    while first < last:
        row, col = divmod(first, width)
        whole = (last - first) // width if col == 0 else 0
        down, across = (whole, width) if whole else (1, min(width - col, last - first))
        yield first, row, col, down, across
        first += down * across


def _cuts(size: int) -> Iterator[tuple[int, int, int]]:
    """(first block, number of blocks, size of each): the whole blocks of a side, then the cut one."""
    whole, rest = divmod(size, SIDE)
    if whole:
        yield 0, whole, SIDE
    if rest:
        yield whole, 1, rest
