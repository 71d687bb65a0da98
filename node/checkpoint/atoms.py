"""Arena order <-> natural shapes, one atom at a time. Works for any dtype."""

import math

import torch
from torch import Tensor

from atoll.protocols.run.arena import SIDE, Placement

_SLAB_VALUES = 1 << 19


def all_finite(values: Tensor) -> bool:
    """Whether a tensor has neither NaN nor infinity; by slabs, so that no mask as large as it is made."""
    return all(bool(part.isfinite().all()) for part in torch.split(values.reshape(-1), _SLAB_VALUES))


def read_atom(arena_C4096: Tensor, place: Placement) -> Tensor:
    """A contiguous copy of one atom in its natural shape."""
    if len(place.shape) == 1:
        return _vector(arena_C4096, place).clone()
    return _blocks(arena_C4096, place)[: place.shape[0], : place.shape[1]].contiguous()


def write_atom(arena_C4096: Tensor, place: Placement, atom: Tensor) -> None:
    """Copy one atom into the (contiguous) arena; padding is left as it is."""
    if len(place.shape) == 1:
        _vector(arena_C4096, place).copy_(atom)
        return
    down, across = place.blocks
    padded = arena_C4096.new_zeros((down * SIDE, across * SIDE))
    padded[: place.shape[0], : place.shape[1]] = atom
    rows = arena_C4096[place.first_chunk : place.first_chunk + down * across]
    rows.copy_(padded.view(down, SIDE, across, SIDE).transpose(1, 2).reshape(down * across, SIDE * SIDE))


def _vector(arena_C4096: Tensor, place: Placement) -> Tensor:
    return arena_C4096[place.first_chunk :].view(-1)[place.offset : place.offset + math.prod(place.shape)]


def _blocks(arena_C4096: Tensor, place: Placement) -> Tensor:
    down, across = place.blocks
    rows = arena_C4096[place.first_chunk : place.first_chunk + down * across]
    return rows.view(down, across, SIDE, SIDE).transpose(1, 2).reshape(down * SIDE, across * SIDE)
