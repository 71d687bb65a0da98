"""Copies between named tensors and rows of the arena's `[C, 4096]` array, exactly, for any dtype and device.

Rows are copied directly between the tensors and a range of chunks, so a caller can go through a model by slabs
and needs no second copy of it. Padding is zero.

Atoms name a module's values, however these are stacked in memory. For a dense decoder these are its parameters.
For a mixture, each expert's projections are views into the stacks of owned and frozen experts.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter

import torch
from torch import Tensor, nn

from atoll.node.learning.model.expert_functions import Packed
from atoll.node.learning.model.experts import Experts, ProjectionPlace
from atoll.protocols.run.arena import CHUNK, SIDE, Arena, Placement, Span
from atoll.protocols.run.lora import is_adapter


def read_rows(named: Mapping[str, Tensor], arena: Arena, start: int, rows_N4096: Tensor) -> None:
    """Fill `rows_N4096` with chunks `start … start + N − 1` of the tensors, converting dtype and device."""
    rows_N4096.zero_()
    for row_values, values in views(named, arena, start, rows_N4096):
        row_values.copy_(values)


def write_rows(named: Mapping[str, Tensor], arena: Arena, start: int, rows_N4096: Tensor) -> None:
    """Copy chunks `start … start + N − 1` into the tensors, converting dtype and device."""
    for row_values, values in views(named, arena, start, rows_N4096):
        values.copy_(row_values)


def gather(named: Mapping[str, Tensor], arena: Arena) -> Tensor:
    """All atoms as one array `[C, 4096]` in the arena's order, with the tensors' dtype and device."""
    first = next(iter(named.values()))
    out_C4096 = torch.empty((arena.chunks, CHUNK), dtype=first.dtype, device=first.device)
    read_rows(named, arena, 0, out_C4096)
    return out_C4096


def views(
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


def parts_of(arena: Arena, span: Span) -> Iterator[tuple[Span, Placement]]:
    """Chunks of a span, cut where matrices meet, with the matrix; all vectors are one part, with any of them."""
    found = _within(arena, span.start, span.stop)
    starts = {place.first_chunk: place for place in found}
    for place, end in zip(starts.values(), [*list(starts)[1:], span.stop], strict=True):
        start = max(span.start, place.first_chunk)
        if start < end:
            yield Span(start, end), place


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


def named_atoms(module: nn.Module) -> dict[str, Tensor]:
    """Atom names -> views of the module's values; writing to a view writes to the module. int8 is left out."""
    return {name: place.values for name, place in _places(module) if place.scale is None}


def write_atoms(module: nn.Module, values: Iterable[tuple[str, Tensor]]) -> None:
    """Copy atoms into a module, converting to its dtypes (int8 included) and devices.

    Raises KeyError for a name that the module does not have.
    """
    places = dict(_places(module))
    with torch.no_grad():
        for name, value in values:
            places[name].write(value)


def all_values(module: nn.Module) -> Iterator[Tensor]:
    """All tensors that a forward reads, as stored, in an order that the set of trained experts determines."""
    yield from module.parameters()
    yield from module.buffers()
    for experts in _stacks(module).values():
        if experts.shelf is not None:
            yield from experts.shelf.on_host()


def trained_atoms(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Atom names -> views of tensors that are named and shaped like the module's parameters (Adam's moments)."""
    stacks = _stacks(module)
    inside = {f"{at}.{name}" for at in stacks for name in ("gate_up", "down")}
    found = {name: _flat(tensor) for name, tensor in tensors.items() if name not in inside}
    for at, experts in stacks.items():
        if f"{at}.gate_up" in tensors:
            pair = Packed(tensors[f"{at}.gate_up"]), Packed(tensors[f"{at}.down"])
            found.update({f"{at}.{name}": place.values for name, place in experts.split(experts.owned, *pair)})
    return found


def frozen_names(module: nn.Module) -> frozenset[str]:
    """Names of the atoms that are not trained here: those of frozen experts."""
    found: set[str] = set()
    for at, experts in _stacks(module).items():
        found.update(f"{at}.{name}" for name, _ in experts.places() if _expert_of(name) in experts.frozen)
    return frozenset(found)


def _expert_of(name: str) -> int:
    """The expert's number of a name: `5.up_proj.weight` -> 5."""
    return int(name.split(".", 1)[0])


def _places(module: nn.Module) -> Iterator[tuple[str, ProjectionPlace]]:
    stacks = _stacks(module)
    inside = {f"{at}.{name}" for at in stacks for name in ("gate_up", "down")}
    for name, value in module.state_dict().items():
        if name not in inside:
            # Factors of adapters are vectors of the arena.
            yield name, ProjectionPlace(value.view(-1) if is_adapter(name) else _flat(value), None)
    for at, experts in stacks.items():
        yield from ((f"{at}.{name}", place) for name, place in experts.places())


def _flat(value: Tensor) -> Tensor:
    """A view as the arena has it: of more than two dimensions, as of a convolution, all but the first are one."""
    return value.view(len(value), -1) if value.dim() > 2 else value


def _stacks(module: nn.Module) -> dict[str, Experts]:
    return {name: part for name, part in module.named_modules() if isinstance(part, Experts)}
