"""Cross-entropy of the last hidden states, slab by slab of tokens: the logits `[N, V]` are never whole.

With gradients, each slab's are computed beside its loss, while its logits are there; so nothing is computed twice.
What is kept is as large as the hidden states and the head. Products are in autocast's dtype, all else in float32.

Letters: N tokens, S tokens of a slab, D model width, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_SLAB_VALUES = 1 << 23
"""Logits of a slab: 32 MiB of float32."""
_LEAST_TOKENS = 512
"""Tokens of a slab at least: each adds to the head's gradient, which costs a pass over it."""


def slab_tokens(vocab: int) -> int:
    """Tokens whose logits exist at once."""
    return max(_LEAST_TOKENS, _SLAB_VALUES // vocab)


def mean_loss(target_BT: Tensor, x_BTD: Tensor, head_VD: Tensor) -> Tensor:
    """Mean cross-entropy, nats per token, with gradients for the hidden states and the head."""
    found: Tensor = _MeanLoss.apply(x_BTD.flatten(0, 1), head_VD, target_BT.flatten())  # type: ignore[no-untyped-call]
    return found


def each_loss(target_BT: Tensor, x_BTD: Tensor, head_VD: Tensor) -> Tensor:
    """Cross-entropy of each token, nats, float32 `[B, T]`. No gradient."""
    x_ND, target_N = x_BTD.flatten(0, 1), target_BT.flatten()
    losses = [loss_S for _, loss_S, _ in _slabs(x_ND, head_VD.to(_product_dtype(x_ND)), target_N)]
    return torch.cat(losses).view(target_BT.shape)


class _MeanLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, head_VD: Tensor, target_N: Tensor) -> Tensor:
        cast_VD = head_VD.to(_product_dtype(x_ND))
        total = x_ND.new_zeros((), dtype=torch.float32)
        x_grad_ND = torch.empty_like(x_ND) if ctx.needs_input_grad[0] else None
        head_grad_VD = torch.zeros_like(head_VD) if ctx.needs_input_grad[1] else None
        for rows, loss_S, share_SV in _slabs(x_ND, cast_VD, target_N):
            total += loss_S.sum()
            if x_grad_ND is None and head_grad_VD is None:
                continue
            # d(−log p_t)/d(logits) = p − [v = t], here over the number of tokens
            share_SV.scatter_add_(1, target_N[rows, None], share_SV.new_full((len(loss_S), 1), -1.0))
            grad_SV = share_SV.div_(len(x_ND)).to(cast_VD.dtype)
            if x_grad_ND is not None:
                x_grad_ND[rows] = grad_SV @ cast_VD
            if head_grad_VD is not None:
                head_grad_VD += grad_SV.T @ x_ND[rows].to(grad_SV.dtype)
        ctx.save_for_backward(x_grad_ND, head_grad_VD)
        return total / len(x_ND)

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        # In place: autograd notices if it is asked a second time.
        x_grad_ND, head_grad_VD = (None if grad is None else grad.mul_(scale) for grad in ctx.saved_tensors)
        return x_grad_ND, head_grad_VD, None


def _slabs(x_ND: Tensor, cast_VD: Tensor, target_N: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(rows, loss of each token `[S]`, probabilities `[S, V]`) of each slab; both float32."""
    with torch.autocast(x_ND.device.type, enabled=False):
        for start in range(0, len(x_ND), size := slab_tokens(len(cast_VD))):
            rows = slice(start, start + size)
            logits_SV = (x_ND[rows].to(cast_VD.dtype) @ cast_VD.T).float()
            most_S1 = logits_SV.amax(1, keepdim=True)
            logit_S = logits_SV.gather(1, target_N[rows, None])[:, 0]
            share_SV = logits_SV.sub_(most_S1).exp_()
            sum_S1 = share_SV.sum(1, keepdim=True)
            loss_S = (sum_S1.log() + most_S1)[:, 0] - logit_S
            yield rows, loss_S, share_SV.div_(sum_S1)


def _product_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
