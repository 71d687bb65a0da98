"""The inverse of `bridge.gather`, for comparing arena arrays atom by atom."""

from torch import Tensor

from atoll.node.learning.model.bridge import write_rows
from atoll.protocols.run.arena import Arena


def scatter(arena_C4096: Tensor, arena: Arena) -> dict[str, Tensor]:
    """The atoms of an arena array by name, as contiguous copies."""
    named = {place.name: arena_C4096.new_empty(place.shape) for place in arena.placements}
    write_rows(named, arena, 0, arena_C4096)
    return named
