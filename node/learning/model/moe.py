"""A mixture of experts in place of the feed-forward: top-k routing, nothing dropped.

Softmax over all slots, the k best of each token, their outputs summed with the router's weights (Shazeer et al.,
arXiv 1701.06538; dropless as MegaBlocks, arXiv 2211.15841). Slots from E on are zero experts (LongCat-Flash,
arXiv 2509.01322): they give the token back as it is.

Letters: N tokens, k slots of a token, P = N·k rows, S slots, D model width.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.node.learning.model.experts import Experts
from atoll.protocols.run.model_spec import ExpertsSpec


class Choice(NamedTuple):
    """What the router says of N tokens."""

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

    def forward(self, x_ND: Tensor) -> Choice:
        """The k slots of each token. The bias moves which ones, never their weights."""
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
        return Choice(slot_Nk, weight_Nk, logits_NS, probability_NS)


def load_balance(mean_E: Tensor, count_E: Tensor) -> Tensor:
    """E · Σ_e share of rows · mean probability of one layer: 1 when even (Switch, arXiv 2101.03961, eq. 4).

    Only experts with parameters take part, and both factors are shares among them: how much goes to zero
    experts is the controller's to decide.
    """
    share_E = count_E / count_E.sum().clamp_min(1)
    return len(share_E) * (share_E * mean_E).sum() / mean_E.sum()


def router_z(logits_NS: Tensor) -> Tensor:
    """Mean of the squared log of the softmax's denominator (ST-MoE, arXiv 2202.08906, eq. 5)."""
    return logits_NS.logsumexp(-1).square().mean()


class Load(NamedTuple):
    """What one layer's router did with N tokens, as far as the loss asks; experts with parameters only."""

    count_E: Tensor
    mean_E: Tensor
    """Mean probability, with gradient."""
    z: Tensor
    """`router_z`, with gradient."""
    tokens: int
    experts: ExpertsSpec

    @property
    def term(self) -> Tensor:
        """The layer's share of the loss."""
        balance = load_balance(self.mean_E, self.count_E)
        return self.experts.load_balance * balance + self.experts.router_z * self.z


class Loads:
    """Collects the loads of a forward. Not a list: what wraps modules copies the lists that it passes on."""

    def __init__(self) -> None:
        self.layers: list[Load] = []


Pool = Callable[[Tensor], Tensor]
"""Means over the tokens here -> means over the tokens of all processes that share a step."""


def pooled(loads: Sequence[Load], pool: Pool) -> list[Load]:
    """Loads of all tokens of a step, as if there were as many as here: the balance is not linear in them, so the
    mean over processes of each one's own term would be another loss than that of one process.

    Gradients are those of the tokens here alone, of their own mean: the mean of these over processes, each with
    its share of the tokens, is the gradient of the whole.
    """
    here_L2E = torch.stack([torch.stack((load.count_E / load.tokens, load.mean_E.detach())) for load in loads])
    found = []
    for load, (rate_E, mean_E) in zip(loads, pool(here_L2E), strict=True):
        followed_E = load.mean_E + (mean_E - load.mean_E).detach()
        found.append(load._replace(count_E=rate_E * load.tokens, mean_E=followed_E))
    return found


class Mixture(nn.Module):
    """Router and experts of one layer."""

    def __init__(
        self, dim: int, experts: ExpertsSpec, owned: frozenset[int], frozen_dtype: torch.dtype, on_host: bool
    ) -> None:
        super().__init__()
        self.gate = Router(dim, experts)
        self.experts = Experts(dim, experts, owned, frozen_dtype, on_host)
        self._spec = experts
        order = (*self.experts.owned, *self.experts.frozen, *range(experts.count, experts.slots))
        self.rank_S: Tensor
        self.register_buffer("rank_S", torch.tensor(order).argsort(), persistent=False)
        self.seen_S: Tensor
        self.register_buffer("seen_S", torch.zeros(experts.slots, dtype=torch.int64), persistent=False)

    def forward(self, x_BTD: Tensor, loads: Loads | None) -> Tensor:
        """The experts' weighted sum; adds what the router did to `loads`."""
        x_ND = x_BTD.flatten(0, 1)
        choice = self.gate(x_ND)
        count_S = choice.slot_Nk.flatten().bincount(minlength=self._spec.slots)
        if loads is not None:
            loads.layers.append(self._load(choice, count_S))
            self.seen_S += count_S
        return self._mix(x_ND, choice, count_S).view_as(x_BTD)

    def _mix(self, x_ND: Tensor, choice: Choice, count_S: Tensor) -> Tensor:
        per_token = choice.slot_Nk.shape[1]
        order_P = self.rank_S[choice.slot_Nk.flatten()].argsort(stable=True)
        x_PD = x_ND.index_select(0, order_P // per_token)
        y_PD = self._rows(x_PD, torch.empty_like(count_S).scatter_(0, self.rank_S, count_S).tolist())
        y_PD = y_PD * choice.weight_Nk.flatten().index_select(0, order_P)[:, None]
        back_P = torch.empty_like(order_P).scatter_(0, order_P, torch.arange(len(order_P), device=order_P.device))
        return y_PD.index_select(0, back_P).view(len(x_ND), per_token, -1).sum(1)

    def _rows(self, x_PD: Tensor, counts: list[int]) -> Tensor:
        """Each row through its expert; the last rows are those of the zero experts."""
        device = x_PD.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_PD.dtype
        if not self._spec.zero:
            return self.experts(x_PD.to(dtype), counts).to(x_PD.dtype)  # type: ignore[no-any-return]
        real = sum(counts[: self._spec.count])
        x_RD, same_ZD = x_PD.split_with_sizes([real, len(x_PD) - real])
        return torch.cat((self.experts(x_RD.to(dtype), counts[: self._spec.count]).to(x_PD.dtype), same_ZD))

    def _load(self, choice: Choice, count_S: Tensor) -> Load:
        count, logits_NS = self._spec.count, choice.logits_NS
        mean_E = choice.probability_NS[:, :count].mean(0)
        return Load(count_S[:count], mean_E, router_z(logits_NS), len(logits_NS), self._spec)
