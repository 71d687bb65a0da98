"""SparseLoCo's published pipeline as its authors coded it, in torch: what `atoll bench compress` compares with.

Per tensor: torch.topk of |x| in every chunk, one lookup of four bins of 1.5 σ for the whole tensor, 12-bit
indices, a byte per code; the sender decodes its own payload to know what stays in e. The receiver widens the
indices to int64, concatenates the peers, and takes the mean over those who sent an index. Written anew from the
description; chunks are contiguous here, so that it is not charged for cutting matrices into blocks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.protocols.errors import DecodeError

BINS = 4
RANGE_SIGMAS = 6.0


class Sent(NamedTuple):
    """One tensor of one peer."""

    packed: Tensor
    """uint8: two indices in three bytes."""
    code_Ck: Tensor
    """uint8."""
    lookup: Tensor
    """float32: the value of each code."""

    @property
    def size_bytes(self) -> int:
        """Indices, codes and lookup."""
        return self.packed.numel() + self.code_Ck.numel() + 4 * self.lookup.numel()


def encode(residual: Tensor, base: Tensor, local: Tensor, beta: float, k: int) -> Sent:
    """What is sent of β·e + base − local; the residual `[C, 4096]` becomes what was not sent."""
    delta = base - local
    residual.mul_(beta).add_(delta)
    index = torch.topk(residual.abs(), k, dim=-1, largest=True, sorted=False).indices
    code, lookup = quantise(residual.gather(-1, index))
    sent = Sent(_pack(index), code, lookup)
    residual.sub_(_mean([sent], residual.shape, k))
    return sent


def fold_into(theta: Tensor, peers: Sequence[Sent], alpha: float, k: int) -> None:
    """θ −= α · mean over those who sent the coordinate.

    As coded there, each peer's indices are unpacked once more to look at their range, and the mean is checked.
    """
    for peer in peers:
        index = _unpack(peer.packed, k)
        if int(index.min()) < 0 or int(index.max()) >= theta.shape[-1]:
            raise DecodeError("an index outside its chunk")
    mean = _mean(peers, theta.shape, k)
    if bool(mean.isfinite().all()):
        theta.sub_(mean, alpha=alpha)


def quantise(value_Ck: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and their values: four bins of 1.5 σ about the tensor's mean, decoded to the means of the bins."""
    shift = value_Ck.mean()
    centred = value_Ck - shift
    step = RANGE_SIGMAS * centred.std() / BINS
    step = torch.where(step == 0, 1.0, step)
    code = (centred / step + BINS / 2).round().clamp(0, BINS - 1).to(torch.uint8)
    at = code.flatten().long()
    nothing = torch.zeros(BINS, device=at.device)
    total = nothing.scatter_add(0, at, centred.flatten())
    count = nothing.scatter_add(0, at, torch.ones(at.shape, device=at.device))
    return code, total / count.clamp(min=1) + shift


def _mean(peers: Sequence[Sent], shape: torch.Size, k: int) -> Tensor:
    index = torch.cat([_unpack(peer.packed, k) for peer in peers], dim=-1)
    value = torch.cat([peer.lookup[peer.code_Ck.long()] for peer in peers], dim=-1)
    return torch.zeros(shape, device=value.device).scatter_reduce_(
        -1, index, value, reduce="mean", include_self=False
    )


def _pack(index_Ck: Tensor) -> Tensor:
    pair = index_Ck.to(torch.int32).view(-1, 2)
    even, odd = pair[:, 0], pair[:, 1]
    three = torch.stack([even & 255, (even >> 8) | ((odd & 15) << 4), odd >> 4], dim=-1)
    return three.to(torch.uint8).flatten()


def _unpack(packed: Tensor, k: int) -> Tensor:
    three = packed.view(-1, 3).to(torch.int64)
    even = three[:, 0] | ((three[:, 1] & 15) << 8)
    odd = (three[:, 1] >> 4) | (three[:, 2] << 4)
    return torch.stack([even, odd], dim=-1).view(-1, k)
