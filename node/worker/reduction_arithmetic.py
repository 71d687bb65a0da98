"""The arithmetic of reductions, put together from the codec and the mean; the worker's side."""

import torch
from torch import Tensor

from atoll.node.learning.compress import sparse2
from atoll.node.learning.compress.encoding import encode_residual
from atoll.node.learning.outer.mean import divisor, outer_step, round_half_away, sums
from atoll.node.learning.reduction.arithmetic import Arithmetic


def encode(values_C4096: Tensor, k: int) -> bytes:
    """Payload of finite float32 values, by the compiled encoder. The values are used up."""
    nowhere = torch.zeros_like(values_C4096)
    return encode_residual(values_C4096, nowhere, nowhere, 1.0, k, codec="sparse2")


PLAIN = Arithmetic(sparse2.encode, sparse2.decode, sums, divisor, round_half_away, outer_step)
"""Torch only: small pieces, such as one chunk that is judged."""
COMPILED = PLAIN._replace(encode=encode)
"""Same bits; whole slices."""
