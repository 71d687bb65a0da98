"""Named tensors ↔ the arena's `[C, 4096]` array. Exact, any dtype, any device; padding is zero."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.protocols.arena import CHUNK, SIDE, Arena, Placement


def gather(named: Mapping[str, Tensor], arena: Arena) -> Tensor:
    """One array `[C, 4096]` of all atoms, in the arena's order, with the tensors' dtype and device."""
    first = next(iter(named.values()))
    out_C4096 = torch.zeros((arena.chunks, CHUNK), dtype=first.dtype, device=first.device)
    flat = out_C4096.view(-1)
    for place in arena.placements:
        value = named[place.name].detach()
        if len(place.shape) == 1:
            at = place.first_chunk * CHUNK + place.offset
            flat[at : at + place.shape[0]] = value
        else:
            rows, cols = place.blocks
            blocks = out_C4096[place.first_chunk : place.first_chunk + rows * cols]
            blocks.view(rows, cols, SIDE, SIDE).copy_(_padded(value, place).permute(0, 2, 1, 3))
    return out_C4096


def scatter(arena_C4096: Tensor, arena: Arena) -> dict[str, Tensor]:
    """The atoms of an arena array by name, as contiguous copies. The inverse of `gather`."""
    return {place.name: _one(arena_C4096, place).clone() for place in arena.placements}


def fill(module: nn.Module, arena_C4096: Tensor, arena: Arena) -> None:
    """Copy an arena array into a module's parameters, converting dtype and device."""
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for place in arena.placements:
            parameters[place.name].copy_(_one(arena_C4096, place))


def read(module: nn.Module, arena: Arena) -> Tensor:
    """A module's parameters as an arena array `[C, 4096]`."""
    return gather(dict(module.named_parameters()), arena)


def _padded(value: Tensor, place: Placement) -> Tensor:
    rows, cols = place.blocks
    height, width = place.shape
    padded = functional.pad(value, (0, cols * SIDE - width, 0, rows * SIDE - height))
    return padded.view(rows, SIDE, cols, SIDE)


def _one(arena_C4096: Tensor, place: Placement) -> Tensor:
    if len(place.shape) == 1:
        at = place.first_chunk * CHUNK + place.offset
        return arena_C4096.reshape(-1)[at : at + place.shape[0]]
    rows, cols = place.blocks
    blocks = arena_C4096[place.first_chunk : place.first_chunk + rows * cols]
    whole = blocks.view(rows, cols, SIDE, SIDE).permute(0, 2, 1, 3).reshape(rows * SIDE, cols * SIDE)
    return whole[: place.shape[0], : place.shape[1]]
