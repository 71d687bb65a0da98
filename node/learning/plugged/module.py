"""The module and the loss of a run whose model is a package's."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from atoll.node.learning.inner.passes import Loss
from atoll.node.learning.plugged.interface import PluggedModel
from atoll.node.learning.plugged.loading import flat, model_of
from atoll.protocols.errors import ConfigError
from atoll.protocols.run.model_spec import ModelSpec


class Plugged(NamedTuple):
    """What a worker trains."""

    module: nn.Module
    loss_of: Loss


def plugged_module(model: ModelSpec) -> Plugged:
    """The module, with undefined values, and its loss on windows. Raises ConfigError for one that no run holds."""
    assert model.plugin is not None, "a model of a package"
    made, plugin = model_of(model), model.plugin
    module = made.build()
    wanted, found = {one.name: one.shape for one in plugin.tensors}, dict(_shapes(module))
    if found != wanted:
        name = next(name for name in [*wanted, *found] if wanted.get(name) != found.get(name))
        is_other = name in wanted and name in found
        what = "another shape" if is_other else "none" if name in wanted else "one that the run does not have"
        raise ConfigError(
            f"the module of {plugin.name} does not fit the run: tensor {name}: {what}",
            hint=f"ask who made {plugin.package}: it must have float32 parameters alone, as it told the run",
        )
    return Plugged(module, _loss_of(made, plugin.name))


def _shapes(module: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Shapes, as the arena has them, of all values by name. A buffer has no shape there: it fits no run."""
    for name, value in module.named_parameters():
        is_held = value.dtype == torch.float32 and value.is_contiguous() and value.requires_grad
        yield name, flat(tuple(value.shape)) if is_held else ()
    for name, _ in module.named_buffers():
        yield name, ()


def _loss_of(made: PluggedModel, name: str) -> Loss:
    def loss_of(module: nn.Module, window_BT1: Tensor) -> Tensor:
        """Mean loss of examples, which are windows without their last value."""
        found = made.loss(module, window_BT1[:, :-1])
        if found.shape:  # it would be broadcast, and the loss of a step is one number
            raise ConfigError(f"model {name} gave a loss of shape {tuple(found.shape)}, no scalar")
        return found

    return loss_of
