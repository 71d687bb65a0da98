"""Controls the routers' choice bias (LongCat-Flash, arXiv 2509.01322; without auxiliary loss: arXiv 2408.15664).

After each inner step, bias += rate · (target share − seen share) for experts with parameters. Zero experts stay
at 0, because only differences matter. The bias is an atom like any other (`model_spec.BIAS`): it starts at 0, a
member moves it by the routing of its own tokens, and the fold averages these moves.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from atoll.node.learning.model.moe import Mixture
from atoll.protocols.run.model_spec import ExpertsSpec, ModelSpec


def target_share(experts: ExpertsSpec) -> float:
    """Target share of all rows for each expert with parameters."""
    computed = experts.per_token if experts.computed is None else experts.computed
    return computed / experts.per_token / experts.count


def updated_bias(bias_S: Tensor, seen_S: Tensor, experts: ExpertsSpec) -> Tensor:
    """The bias `[S]` after a step in which slots got `seen_S` rows. Pure."""
    share_S = seen_S / seen_S.sum().clamp_min(1)
    step_S = experts.bias_rate * (target_share(experts) - share_S)
    step_S[experts.count :] = 0
    return bias_S + step_S.to(bias_S.dtype)


Total = Callable[[Tensor], Tensor]
"""Sums a tensor over all processes that share a step."""


def own_total(seen: Tensor) -> Tensor:
    """The sum for a step of one process."""
    return seen


def bias_updater(module: nn.Module, model: ModelSpec, total: Total = own_total) -> Callable[[], None]:
    """A function to call after each inner step, which moves the module's biases if the model has any."""
    experts = model.experts
    if experts is None or not experts.bias_rate:
        return lambda: None
    return partial(move_biases, module, experts, total)


def biases(module: nn.Module) -> list[Tensor]:
    """The choice biases `[S]` of all layers that have one; no gradient moves them."""
    found = (layer.gate.e_score_correction_bias for layer in module.modules() if isinstance(layer, Mixture))
    return [bias_S for bias_S in found if bias_S is not None]


def move_biases(module: nn.Module, experts: ExpertsSpec, total: Total = own_total) -> None:
    """Move the bias of every layer by the rows that its slots got since the last call, and reset these counts."""
    layers = [layer for layer in module.modules() if isinstance(layer, Mixture)]
    with torch.no_grad():
        for layer, seen_S in zip(layers, total(torch.stack([layer.seen_S for layer in layers])), strict=True):
            bias_S = layer.gate.e_score_correction_bias
            if bias_S is not None:
                bias_S.copy_(updated_bias(bias_S, seen_S, experts))
            layer.seen_S.zero_()
