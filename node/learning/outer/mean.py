"""The outer step of a set of contributions: a weighted mean in exact integers.

Bit budget for 1024 members (all bounds come from the protocol and are checked there):

    |q| ≤ 12·2²⁴ < 2²⁸    weight < 2⁸    members ≤ 2¹⁰    α·256 ≤ 2¹⁰
    |numerator| < 2⁴⁶     divisor < 2¹⁸   |α·numerator| < 2⁵⁶   2·|…| + 1024·divisor < 2⁵⁸ < 2⁶³
    |U| ≤ 4 · 12/4 · 2²⁴ < 2²⁸: fits int32

Where contributions cover only some chunks, this is the outer step of a chunk's own members: those who cover it.
Sums of integers have no order, so any order, grouping or device gives the same bits. The compiled fold
(`compress.sparse_fold`, `compress.dense`) gives these bits too; this is the definition, and the way of reduced
rounds.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.protocols.run.arena import CHUNK

Weighted = tuple[int, Tensor, Tensor]
"""Weight ≥ 1, index_Ck int64, q_Ck int64 (units of 2⁻²⁶; 0: nothing was sent)."""

SLAB_CHUNKS = 256
"""Chunks that are summed at once: 16 MiB of int64."""


def outer_update(members: Sequence[Weighted], chunks: int, alpha_256: int, floor_256: int) -> Tensor:
    """U int32 `[chunks, 4096]`, units of 2⁻²⁴, of the members of one round's set, each given once.

    All weights together are those of at most 1024 contributions, 255 each; a Reduction has the weight of all that
    it covers. The caller has checked that.
    """
    # Of the whole set, not of a slab: the floor is a share of all weight, wherever it was sent.
    total = sum(weight for weight, _, _ in members)
    update = torch.zeros((chunks, CHUNK), dtype=torch.int32)
    for start in range(0, chunks if members else 0, SLAB_CHUNKS):
        rows = slice(start, min(start + SLAB_CHUNKS, chunks))
        numerator, sent = sums([(weight, index[rows], q[rows]) for weight, index, q in members])
        share = divisor(sent, total, floor_256)
        update[rows] = outer_step(numerator, share, alpha_256).to(torch.int32)
    return update


def weighted_mean(members: Sequence[Weighted], floor_256: int) -> Tensor:
    """int64 `[C, 4096]`, units of 2⁻²⁶: Σ weight·q over the divisor of the round, rounded once."""
    numerator, sent = sums(members)
    return round_half_away(numerator, divisor(sent, sum(weight for weight, _, _ in members), floor_256))


def sums(members: Sequence[Weighted]) -> tuple[Tensor, Tensor]:
    """int64 `[C, 4096]` twice: Σ weight·q, and the weight of those who sent the coordinate."""
    numerator = torch.zeros((len(members[0][1]), CHUNK), dtype=torch.int64)
    sent = torch.zeros_like(numerator)
    for weight, index, q in members:
        numerator.scatter_add_(1, index, q * weight)
        # Silence is a vote for no change only up to the floor: q = 0 adds no weight to the divisor.
        sent.scatter_add_(1, index, (q != 0) * weight)
    return numerator, sent


def divisor(sent_C4096: Tensor, total: int, floor_256: int) -> Tensor:
    """max(weight that sent the coordinate, ceil(floor_256 · total / 256)), at least 1; int64."""
    # Rounded up in integers: ⌈a/b⌉ = −⌊−a/b⌋. At least 1, so that a coordinate nobody sent divides 0 by 1.
    return sent_C4096.clamp(min=max(1, -(-floor_256 * total // 256)))


def outer_step(numerator_C4096: Tensor, divisor_C4096: Tensor, alpha_256: int) -> Tensor:
    """−α·mean, int64, units of 2⁻²⁴: q counts quarters of a unit and α_256 counts 256ths."""
    return -round_half_away(numerator_C4096 * alpha_256, divisor_C4096 * (4 * 256))


def round_half_away(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator (> 0) rounded to the nearest integer, halves away from zero; int64."""
    # On magnitudes: a floor division of negative numbers would round halves towards +∞, and −x would not mirror x.
    size = (2 * numerator.abs() + denominator).div(2 * denominator, rounding_mode="floor")
    return size * numerator.sign()
