"""Gives access to a module's values by the names of its atoms, however they are stacked in memory.

For a dense decoder these are its parameters. For a mixture, each expert's projections are views into the stacks of
owned and frozen experts.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from atoll.node.learning.model.experts import Experts, ProjectionPlace
from atoll.node.learning.model.stack import Packed


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
    found = {name: tensor for name, tensor in tensors.items() if name not in inside}
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
            yield name, ProjectionPlace(value, None)
    for at, experts in stacks.items():
        yield from ((f"{at}.{name}", place) for name, place in experts.places())


def _stacks(module: nn.Module) -> dict[str, Experts]:
    return {name: part for name, part in module.named_modules() if isinstance(part, Experts)}
