"""A mixture of experts in place of the feed-forward: top-k routing, nothing dropped.

Softmax over all slots, the k best of each token, their outputs summed with the router's weights (Shazeer et al.,
arXiv 1701.06538; dropless as MegaBlocks, arXiv 2211.15841). Slots from E on are zero experts (LongCat-Flash,
arXiv 2509.01322): they give the token back as it is.

Letters: N tokens, k slots of a token, P = N·k rows, S slots, D model width.
"""

from collections.abc import MutableSequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.node.model.experts import Experts
from atoll.protocols.model import ExpertsSpec


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


def load_balance(probability_NE: Tensor, count_E: Tensor) -> Tensor:
    """E · Σ_e share of rows · mean probability of one layer: 1 when even (Switch, arXiv 2101.03961, eq. 4).

    Only experts with parameters take part, and both factors are shares among them: how much goes to zero
    experts is the controller's to decide.
    """
    share_E = count_E / count_E.sum().clamp_min(1)
    mean_E = probability_NE.mean(0)
    return len(share_E) * (share_E * mean_E).sum() / mean_E.sum()


def router_z(logits_NS: Tensor) -> Tensor:
    """Mean of the squared log of the softmax's denominator (ST-MoE, arXiv 2202.08906, eq. 5)."""
    return logits_NS.logsumexp(-1).square().mean()


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

    def forward(self, x_BTD: Tensor, terms: MutableSequence[Tensor] | None) -> Tensor:
        """The experts' weighted sum; appends this layer's share of the loss to `terms`."""
        x_ND = x_BTD.flatten(0, 1)
        choice = self.gate(x_ND)
        count_S = choice.slot_Nk.flatten().bincount(minlength=self._spec.slots)
        if terms is not None:
            terms.append(self._term(choice, count_S))
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

    def _term(self, choice: Choice, count_S: Tensor) -> Tensor:
        count = self._spec.count
        balance = load_balance(choice.probability_NS[:, :count], count_S[:count])
        return self._spec.load_balance * balance + self._spec.router_z * router_z(choice.logits_NS)
