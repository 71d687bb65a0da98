"""A mixture of experts in place of the feed-forward: top-k routing without dropped tokens.

The router takes a softmax over all slots. The outputs of a token's k best slots are summed with the router's
weights (Shazeer et al., arXiv 1701.06538; dropless as MegaBlocks, arXiv 2211.15841). Slots from E on are zero
experts (LongCat-Flash, arXiv 2509.01322), which return the token unchanged.

Letters: N tokens, k slots of a token, P = N·k rows, S slots, D model width.

A controller of the router's choice bias keeps the experts' loads even (LongCat-Flash; without auxiliary loss:
arXiv 2408.15664). After each inner step, bias += rate · (target share − seen share) for experts with parameters.
Zero experts stay at 0, because only differences matter. The bias is an atom like any other (`model_spec.BIAS`):
it starts at 0, a member moves it by the routing of its own tokens, and the fold averages these moves.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.node.learning.model.expert_functions import uses_grouped_product
from atoll.node.learning.model.experts import Experts
from atoll.protocols.run.model_spec import ExpertsSpec, ModelSpec


class Routing(NamedTuple):
    """The router's result for N tokens."""

    slot_Nk: Tensor
    weight_Nk: Tensor
    logits_NS: Tensor
    probability_NS: Tensor


class Router(nn.Module):
    """Scores every slot for every token, in float32."""

    def __init__(self, dim: int, experts: ExpertsSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts.slots, dim))
        self._per_token, self._normalise = experts.per_token, experts.normalise
        bias = torch.zeros(experts.slots) if experts.bias_rate else None
        self.register_buffer("e_score_correction_bias", bias)
        self.e_score_correction_bias: Tensor | None

    def forward(self, x_ND: Tensor) -> Routing:
        """The k slots of each token and their weights. The bias affects which slots, never the weights."""
        with torch.autocast(x_ND.device.type, enabled=False):
            logits_NS = functional.linear(x_ND.float(), self.weight.float())
        probability_NS = logits_NS.softmax(-1)
        scores_NS = probability_NS
        if self.e_score_correction_bias is not None:
            scores_NS = probability_NS + self.e_score_correction_bias
        slot_Nk = scores_NS.topk(self._per_token, -1).indices
        weight_Nk = probability_NS.gather(-1, slot_Nk)
        if self._normalise:
            weight_Nk = weight_Nk / weight_Nk.sum(-1, keepdim=True)
        return Routing(slot_Nk, weight_Nk, logits_NS, probability_NS)


def load_balance(mean_E: Tensor, count_E: Tensor) -> Tensor:
    """E · Σ_e share of rows · mean probability of one layer, 1 if even (Switch, arXiv 2101.03961, eq. 4).

    Only experts with parameters count, and both factors are shares among them: the bias controller decides how
    much goes to zero experts.
    """
    share_E = count_E / count_E.sum().clamp_min(1)
    return len(share_E) * (share_E * mean_E).sum() / mean_E.sum()


def router_z(logits_NS: Tensor) -> Tensor:
    """Router z-loss: the mean squared log of the softmax's denominator (ST-MoE, arXiv 2202.08906, eq. 5)."""
    return logits_NS.logsumexp(-1).square().mean()


class RouterLoad(NamedTuple):
    """What the loss needs of one layer's routing of N tokens, for experts with parameters."""

    count_E: Tensor
    """Rows of each expert."""
    mean_E: Tensor
    """Mean probability of each expert, with gradient."""
    z: Tensor
    """`router_z`, with gradient."""
    tokens: int
    experts: ExpertsSpec

    @property
    def term(self) -> Tensor:
        """The layer's auxiliary loss: load balance and router z."""
        balance = load_balance(self.mean_E, self.count_E)
        return self.experts.load_balance * balance + self.experts.router_z * self.z


class RouterLoads:
    """Collects the loads of a forward. It is no list, because module wrappers copy lists that they pass on."""

    def __init__(self) -> None:
        self.layers: list[RouterLoad] = []


Pool = Callable[[Tensor], Tensor]
"""Turns means over some tokens of a step (`mean_loads`) into means over all of them."""


def mean_loads(loads: Sequence[RouterLoad]) -> Tensor:
    """Rows of each expert and its probability, means over tokens without gradient, `[L, 2, E]`."""
    return torch.stack([torch.stack((load.count_E / load.tokens, load.mean_E.detach())) for load in loads])


def pooled_loads(loads: Sequence[RouterLoad], pool: Pool) -> list[RouterLoad]:
    """The loads of all tokens of a step, scaled to the number of tokens of this part.

    The balance is not linear in the loads, so averaging each part's own term would be another loss than that of
    the whole step. Gradients are those of this part's tokens; their weighted mean over the parts is the whole one.
    """
    found = []
    for load, (rate_E, mean_E) in zip(loads, pool(mean_loads(loads)), strict=True):
        followed_E = load.mean_E + (mean_E - load.mean_E).detach()
        found.append(load._replace(count_E=rate_E * load.tokens, mean_E=followed_E))
    return found


class Mixture(nn.Module):
    """The router and the experts of one layer."""

    def __init__(
        self, dim: int, experts: ExpertsSpec, owned: frozenset[int], frozen_dtype: torch.dtype, on_host: bool
    ) -> None:
        super().__init__()
        self.gate = Router(dim, experts)
        self.experts = Experts(dim, experts, owned, frozen_dtype, on_host)
        self.spec = experts
        order = (*self.experts.owned, *self.experts.frozen, *range(experts.count, experts.slots))
        self.rank_S: Tensor
        self.register_buffer("rank_S", torch.tensor(order).argsort(), persistent=False)
        self.seen_S: Tensor
        self.register_buffer("seen_S", torch.zeros(experts.slots, dtype=torch.int64), persistent=False)

    def forward(self, x_BTD: Tensor, loads: RouterLoads | None) -> Tensor:
        """The experts' weighted sum `[B, T, D]`; appends the router's load to `loads` if given."""
        x_ND = x_BTD.flatten(0, 1)
        choice = self.gate(x_ND)
        slot_P = choice.slot_Nk.flatten()
        # Not `bincount`, which asks a device for the largest of them.
        count_S = torch.zeros_like(self.seen_S).scatter_add_(0, slot_P, torch.ones_like(slot_P))
        if loads is not None:
            loads.layers.append(self._load(choice, count_S))
            if torch.is_grad_enabled():  # a layer that is recomputed routes its tokens twice
                self.seen_S += count_S
        return self._mix(x_ND, choice, count_S).view_as(x_BTD)

    def _mix(self, x_ND: Tensor, choice: Routing, count_S: Tensor) -> Tensor:
        per_token = choice.slot_Nk.shape[1]
        order_P = self.rank_S[choice.slot_Nk.flatten()].argsort(stable=True)
        x_PD = x_ND.index_select(0, order_P // per_token)
        y_PD = self._rows(x_PD, torch.empty_like(count_S).scatter_(0, self.rank_S, count_S))
        y_PD = y_PD * choice.weight_Nk.flatten().index_select(0, order_P)[:, None]
        back_P = torch.empty_like(order_P).scatter_(0, order_P, torch.arange(len(order_P), device=order_P.device))
        return y_PD.index_select(0, back_P).view(len(x_ND), per_token, -1).sum(1)

    def _rows(self, x_PD: Tensor, count_S: Tensor) -> Tensor:
        """Each row `[P, D]` through its expert; the last rows belong to zero experts and stay unchanged."""
        device = x_PD.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_PD.dtype
        rows_PD = x_PD.to(dtype)
        if uses_grouped_product(rows_PD, x_PD.shape[1], self.spec.ffn):
            end_E = count_S[: self.spec.count].cumsum(0, dtype=torch.int32)
            y_PD = self.experts.grouped(rows_PD, end_E).to(x_PD.dtype)
            if not self.spec.zero:
                return y_PD
            return torch.where(torch.arange(len(x_PD), device=end_E.device)[:, None] < end_E[-1], y_PD, x_PD)
        counts = count_S.tolist()
        if not self.spec.zero:
            return self.experts(rows_PD, counts).to(x_PD.dtype)  # type: ignore[no-any-return]
        real = sum(counts[: self.spec.count])
        x_RD, same_ZD = x_PD.split_with_sizes([real, len(x_PD) - real])
        return torch.cat((self.experts(x_RD.to(dtype), counts[: self.spec.count]).to(x_PD.dtype), same_ZD))

    def _load(self, choice: Routing, count_S: Tensor) -> RouterLoad:
        count, logits_NS = self.spec.count, choice.logits_NS
        mean_E = choice.probability_NS[:, :count].mean(0)
        return RouterLoad(count_S[:count], mean_E, router_z(logits_NS), len(logits_NS), self.spec)


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


def bias_updater(module: nn.Module, model: ModelSpec, total: Total) -> Callable[[], None]:
    """A function to call after each inner step, which moves the module's biases if the model has any."""
    experts = model.experts
    if experts is None or not experts.bias_rate:
        return lambda: None
    return partial(move_biases, module, experts, total)


def forget_rows(module: nn.Module, _step: int = 0) -> None:
    """Reset what `move_biases` reads, before any step or another attempt at one."""
    for layer in module.modules():
        if isinstance(layer, Mixture):
            layer.seen_S.zero_()


def biases(module: nn.Module) -> list[Tensor]:
    """The choice biases `[S]` of all layers that have one; no gradient moves them."""
    found = (layer.gate.e_score_correction_bias for layer in module.modules() if isinstance(layer, Mixture))
    return [bias_S for bias_S in found if bias_S is not None]


def move_biases(module: nn.Module, experts: ExpertsSpec, total: Total) -> None:
    """Move the bias of every layer by the rows that its slots got since the last call, and reset these counts."""
    layers = [layer for layer in module.modules() if isinstance(layer, Mixture)]
    with torch.no_grad():
        for layer, seen_S in zip(layers, total(torch.stack([layer.seen_S for layer in layers])), strict=True):
            bias_S = layer.gate.e_score_correction_bias
            if bias_S is not None:
                bias_S.copy_(updated_bias(bias_S, seen_S, experts))
            layer.seen_S.zero_()
