"""Exact top-k of each chunk, ties broken by the lower index, the same on every machine."""

import torch
from torch import Tensor

from atoll.protocols.run.arena import CHUNK


def top_k(values_C4096: Tensor, k: int) -> Tensor:
    """Indices `[C, k]` int64, rising, of the k largest magnitudes of each row of finite float32.

    torch.topk promises no order among equal values, so it gets keys that are all distinct: the bits of
    |x| (they rise with |x|), then the index from the end.
    """
    magnitude = values_C4096.contiguous().view(torch.int32) & 0x7FFFFFFF
    key = magnitude.to(torch.int64) << 12
    key |= torch.arange(CHUNK - 1, -1, -1)
    return key.topk(k, dim=1, sorted=False).indices.sort(dim=1).values
