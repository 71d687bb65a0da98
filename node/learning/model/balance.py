"""The controller of the choice bias (LongCat-Flash, arXiv 2509.01322; without auxiliary loss: arXiv 2408.15664).

bias += rate · (target share − seen share) after each inner step, for experts with parameters; zero experts stay
at 0, so that only differences to them matter. The bias is an atom like any other (`protocols.model.BIAS`): it
starts at 0 with genesis, a member moves it by what its own tokens did, and the fold takes the mean of those moves.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from atoll.node.learning.model.moe import Mixture
from atoll.protocols.run.model_spec import ExpertsSpec, ModelSpec


def target_share(experts: ExpertsSpec) -> float:
    """Wanted share of all rows for each expert with parameters."""
    computed = experts.per_token if experts.computed is None else experts.computed
    return computed / experts.per_token / experts.count


def moved(bias_S: Tensor, seen_S: Tensor, experts: ExpertsSpec) -> Tensor:
    """The bias after a step in which the slots got `seen_S` rows. Pure."""
    share_S = seen_S / seen_S.sum().clamp_min(1)
    step_S = experts.bias_rate * (target_share(experts) - share_S)
    step_S[experts.count :] = 0
    return bias_S + step_S.to(bias_S.dtype)


Total = Callable[[Tensor], Tensor]
"""Sum over all processes that share a step."""


def alone(seen: Tensor) -> Tensor:
    """The total where one process takes the whole step."""
    return seen


def follower(module: nn.Module, model: ModelSpec, total: Total = alone) -> Callable[[], None]:
    """What must follow each inner step of a module of this model: its biases move, where it has any."""
    experts = model.experts
    if experts is None or not experts.bias_rate:
        return lambda: None
    return partial(move_biases, module, experts, total)


def biases(module: nn.Module) -> list[Tensor]:
    """Those of all layers that have one: what steps move and no gradient does."""
    found = (layer.gate.e_score_correction_bias for layer in module.modules() if isinstance(layer, Mixture))
    return [bias_S for bias_S in found if bias_S is not None]


def move_biases(module: nn.Module, experts: ExpertsSpec, total: Total = alone) -> None:
    """Move the bias of every layer by what it saw since the last call, and forget what it saw."""
    layers = [layer for layer in module.modules() if isinstance(layer, Mixture)]
    with torch.no_grad():
        for layer, seen_S in zip(layers, total(torch.stack([layer.seen_S for layer in layers])), strict=True):
            bias_S = layer.gate.e_score_correction_bias
            if bias_S is not None:
                bias_S.copy_(moved(bias_S, seen_S, experts))
            layer.seen_S.zero_()
