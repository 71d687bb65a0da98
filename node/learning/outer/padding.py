"""Padding of the arena as tensors: values that belong to no atom, and stay zero in every state."""

from typing import NamedTuple

import torch
from torch import Tensor

from atoll.protocols.run.arena import CHUNK, SIDE, Arena, edges


class Padding(NamedTuple):
    """The chunks that hold padding, and which of their values are real."""

    chunk_P: Tensor
    """Numbers of the chunks, int64, rising."""
    real_P4096: Tensor
    """True where a value is real, bool."""


def padding_of(arena: Arena) -> Padding:
    """Padding of a layout; a pure function of the RunSpec."""
    # Only chunks at the edge of an atom hold padding, so a state is cleaned without a mask of its own size.
    found = edges(arena)
    at = torch.arange(CHUNK)
    rows, cols, values = (
        torch.tensor([getattr(edge, name) for edge in found], dtype=torch.int64)[:, None]
        for name in ("rows", "cols", "values")
    )
    real = (at // SIDE < rows) & (at % SIDE < cols) & (at < values)
    return Padding(torch.tensor([edge.chunk for edge in found], dtype=torch.int64), real)


def clear(values_N4096: Tensor, padding: Padding, first: int = 0) -> Tensor:
    """Set the padding of the rows of chunks `first …` to zero, in place, on any device; returns the array."""
    # `chunk_P` rises, so the chunks of a slab are one range of it.
    ends = torch.tensor([first, first + len(values_N4096)])
    low, high = torch.searchsorted(padding.chunk_P, ends).tolist()
    at, real = (each[low:high].to(values_N4096.device) for each in padding)
    values_N4096[at - first] = torch.where(real, values_N4096[at - first], 0)
    return values_N4096
