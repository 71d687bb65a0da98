"""Evaluates a module: nats per token and bits per byte over a fixed set of windows."""

import math
from collections.abc import Iterator

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from atoll.node.learning.inner.passes import Loss, narrow_products, on_device

VAL_WINDOWS = 64
"""Most validation windows, so that evaluation costs a few steps; every member uses the same."""
TOKENS_AT_ONCE = 2048
"""Tokens of a forward pass, or one sequence where that has more: fewer than a step holds (memory_model.py)."""


class ValidationLoss(msgspec.Struct, frozen=True):
    """Loss of one model on the validation windows."""

    val_loss: float
    """Nats per token."""
    val_bpb: float
    """Bits per byte of text, comparable between tokenizers."""


def evaluate(module: nn.Module, loss_of: Loss, windows_WT1: NDArray[np.int64], size_bytes: int) -> ValidationLoss:
    """Loss of `module` on int64 windows `[W, T + 1]` whose predicted tokens stand for `size_bytes` bytes.

    Sums in float64 in a fixed order; products as in a step. Gradients and modes of the module stay as they were.
    """
    device = next(module.parameters()).device
    tokens = windows_WT1.shape[0] * (windows_WT1.shape[1] - 1)
    losses, counts = list[Tensor](), list[int]()
    # Not inference mode: what a sharded module gathers there it could not train with.
    with torch.no_grad(), narrow_products(device):
        for part_WT1 in _parts(windows_WT1):
            losses.append(loss_of(module, on_device(torch.from_numpy(part_WT1), device)).detach())
            counts.append(part_WT1.shape[0] * (part_WT1.shape[1] - 1))
    # Read at the end: in between the host would wait for the device, and then the device for the host.
    nats = 0.0
    for loss, count in zip(torch.stack(losses).tolist(), counts, strict=True):
        nats += loss * count
    return ValidationLoss(nats / tokens, nats / math.log(2) / max(size_bytes, 1))


def losses_of(module: nn.Module, token_losses: Loss, windows_WT1: NDArray[np.int64]) -> list[float]:
    """Loss of `module` on each of the int64 windows `[W, T + 1]`, in nats per token.

    `token_losses`: the loss of each token `[B, T]`. As `evaluate` of each window, but for the order of
    sums, and in float32 on every device: audits look for differences that bfloat16 would round away.
    """
    device = next(module.parameters()).device
    found = list[Tensor]()
    with torch.no_grad():
        for part_WT1 in _parts(windows_WT1):
            part = on_device(torch.from_numpy(part_WT1), device)
            found.append(token_losses(module, part).mean(1, dtype=torch.float64))
    return [loss for part_W in found for loss in part_W.tolist()]


def _parts(windows_WT1: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """As many windows as one forward pass takes."""
    count = max(1, TOKENS_AT_ONCE // (windows_WT1.shape[1] - 1))
    return (windows_WT1[at : at + count] for at in range(0, len(windows_WT1), count))
