"""A module's values by the names of its atoms, however they are stacked in memory.

For a dense decoder these are its parameters. For a mixture, each expert's projections are views into the stacks,
owned and frozen alike.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from atoll.node.learning.model.experts import Experts, ProjectionPlace
from atoll.node.learning.model.stack import Packed


def named_atoms(module: nn.Module) -> dict[str, Tensor]:
    """Views of all values that are floats: writing to one writes to the module. int8 is left out."""
    return {name: place.values for name, place in _places(module) if place.scale is None}


def write_atoms(module: nn.Module, values: Iterable[tuple[str, Tensor]]) -> None:
    """Copy atoms into a module, converting dtype and device, and to int8 where it stores that.

    Raises KeyError for a name that the module does not have.
    """
    places = dict(_places(module))
    with torch.no_grad():
        for name, value in values:
            places[name].write(value)


def all_values(module: nn.Module) -> Iterator[Tensor]:
    """Everything that a forward reads, as it lies in memory, in an order that follows from what is trained."""
    yield from module.parameters()
    yield from module.buffers()
    for experts in _stacks(module).values():
        if experts.shelf is not None:
            yield from experts.shelf.on_host()


def trained_atoms(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views by atom of tensors that are named and shaped like the module's parameters (Adam's moments)."""
    stacks = _stacks(module)
    inside = {f"{at}.{name}" for at in stacks for name in ("gate_up", "down")}
    found = {name: tensor for name, tensor in tensors.items() if name not in inside}
    for at, experts in stacks.items():
        if f"{at}.gate_up" in tensors:
            pair = Packed(tensors[f"{at}.gate_up"]), Packed(tensors[f"{at}.down"])
            found.update({f"{at}.{name}": place.values for name, place in experts.split(experts.owned, *pair)})
    return found


def frozen_names(module: nn.Module) -> frozenset[str]:
    """Atoms that are not trained here: those of the experts on the shelves."""
    stacks = _stacks(module).items()
    found = [(at, name) for at, experts in stacks for name, _ in experts.places() if _of(name) in experts.frozen]
    return frozenset(f"{at}.{name}" for at, name in found)


def _of(name: str) -> int:
    """`5.up_proj.weight` -> 5."""
    return int(name.split(".", 1)[0])


def _places(module: nn.Module) -> Iterator[tuple[str, ProjectionPlace]]:
    stacks = _stacks(module)
    inside = {f"{at}.{name}" for at in stacks for name in ("gate_up", "down")}
    for name, value in module.state_dict().items():
        if name not in inside:
            yield name, ProjectionPlace(value, None)
    for at, experts in stacks.items():
        yield from ((f"{at}.{name}", place) for name, place in experts.places())


def _stacks(module: nn.Module) -> dict[str, Experts]:
    return {name: part for name, part in module.named_modules() if isinstance(part, Experts)}
