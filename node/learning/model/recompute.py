"""Recomputes a layer in the backward pass instead of storing what it needs (Chen et al., arXiv 1604.06174).

torch's own `checkpoint` imports torch's compiler, which takes seconds and 100 MB. This needs neither random
numbers nor nesting, so one function of autograd is enough. Weights are its inputs: their gradients leave by the
usual way, so that wrappers which sum them over processes see each once.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

Body = Callable[[Tensor], tuple[Tensor, ...]]
"""A pure function of its input and of weights; run twice, it gives the same bits."""


def recomputed(body: Body, x: Tensor, weights: Iterable[nn.Parameter]) -> tuple[Tensor, ...]:
    """`body(x)`, of which nothing but `x` is stored. `weights`: all that `body` uses and that are trained."""
    found: tuple[Tensor, ...] = _Recomputed.apply(body, x, *weights)  # type: ignore[no-untyped-call]
    return found


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, body: Body, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        device = x.device.type
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        ctx.body, ctx.weights = body, weights
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        found = body(x)
        ctx.mark_non_differentiable(*(value for value in found if not value.is_floating_point()))
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        device, dtype, enabled = ctx.autocast
        with torch.enable_grad(), torch.autocast(device, dtype, enabled, cache_enabled=False):
            again = ctx.body(x)
        asked = [(value, grad) for value, grad in zip(again, grads, strict=True) if grad is not None]
        values, along = zip(*asked, strict=True)
        return None, *torch.autograd.grad(values, (x, *ctx.weights), along, allow_unused=True)
