"""Two bits per value: a sign and one of two levels, with a scale and a shape per chunk.

The scale, the shape and the set of large values minimise the squared error exactly: for every shape
and every number of small values in order of magnitude the best scale has a closed form (least squares).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from atoll.protocols.run.payload import HIGH_LEVELS, LOW_LEVEL, SCALE_MASK, SHAPE_SHIFT


class Quantised(NamedTuple):
    """What a payload says of the chosen values."""

    word_C: Tensor
    """int64: shape and fp16 scale."""
    code_Ck: Tensor
    """uint8: bit 0 large, bit 1 negative."""


def fit(value_Ck: Tensor) -> Quantised:
    """The best words and codes for finite values. A chunk whose scale rounds to zero has codes 0."""
    size = value_Ck.abs().double()
    rank = size.sort(dim=1).values
    shape, split, scale = _best(rank)
    half = scale.clamp(max=1.0).to(torch.float16)
    live = half > 0
    large = (size > rank.gather(1, split[:, None])) & live[:, None]
    negative = (value_Ck < 0) & live[:, None]
    word = half.view(torch.int16).to(torch.int64) | (torch.where(large.any(1), shape, 0) << SHAPE_SHIFT)
    return Quantised(word, large.to(torch.uint8) | (negative.to(torch.uint8) << 1))


def levels(word_C: Tensor, code_Ck: Tensor) -> Tensor:
    """`q` `[C, k]` int64, units of 2⁻²⁶, of words and codes. Integer arithmetic only."""
    high = torch.tensor(HIGH_LEVELS)[word_C >> SHAPE_SHIFT][:, None]
    level = torch.where((code_Ck & 1).bool(), high, LOW_LEVEL)
    q = level * scale_units(word_C)[:, None]
    return torch.where((code_Ck & 2).bool(), -q, q)


def scale_units(word_C: Tensor) -> Tensor:
    """int64 scales in units of 2⁻²⁴: an fp16 is (1024 + fraction) << (exponent - 1), or its fraction."""
    exponent = (word_C & SCALE_MASK) >> 10
    fraction = word_C & 0x3FF
    return torch.where(exponent > 0, (fraction + 1024) << (exponent - 1).clamp(min=0), fraction)


def _best(rank_Ck: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Shape, index of the largest small value in the ranking, and scale, per chunk, of the least error.

    With levels l the best scale is 4·Σlv / Σl², and the error is Σv² − (Σlv)² / Σl².
    """
    k = rank_Ck.shape[1]
    small = rank_Ck.cumsum(1)[:, None, :]
    large = small[..., -1:] - small
    few = torch.arange(1, k + 1, dtype=torch.float64)
    high = torch.tensor(HIGH_LEVELS, dtype=torch.float64)[:, None]
    dot = LOW_LEVEL * small + high * large
    norm = LOW_LEVEL**2 * few + high**2 * (k - few)
    best = (dot * dot / norm).flatten(1).argmax(1)
    scale = (4 * dot / norm).flatten(1).gather(1, best[:, None])[:, 0]
    return best // k, best % k, scale
