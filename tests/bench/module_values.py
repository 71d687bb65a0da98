"""A whole module's values as one arena array: what a node does slab by slab, for benches and tests."""

from torch import Tensor, nn

from atoll.node.learning.model import bridge
from atoll.node.learning.model.bridge import named_atoms
from atoll.protocols.run.arena import Arena


def fill_module(module: nn.Module, arena_C4096: Tensor, arena: Arena) -> None:
    """Copy an arena array `[C, 4096]` into a module's atoms, converting dtype and device."""
    bridge.write_rows(named_atoms(module), arena, 0, arena_C4096)


def read_module(module: nn.Module, arena: Arena) -> Tensor:
    """A module's atoms as an arena array `[C, 4096]`."""
    return bridge.gather(named_atoms(module), arena)
