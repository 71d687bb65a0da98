"""The outer step of a set of contributions: a weighted mean in exact integers.

Bit budget for 1024 members (all bounds come from the protocol and are checked there):

    |q| ≤ 12·2²⁴ < 2²⁸    weight < 2⁸    members ≤ 2¹⁰    α·256 ≤ 2¹⁰
    |numerator| < 2⁴⁶     divisor < 2¹⁸   |α·numerator| < 2⁵⁶   2·|…| + 1024·divisor < 2⁵⁸ < 2⁶³
    |U| ≤ 4 · 12/4 · 2²⁴ < 2²⁸: fits int32

Where contributions cover only some chunks, this is the outer step of a chunk's own members: those who cover it.
Sums of integers have no order, so any order, grouping or device gives the same bits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.protocols.errors import DecodeError
from atoll.protocols.ledger.records import MAX_SET, MAX_WEIGHT
from atoll.protocols.run.arena import CHUNK

Weighted = tuple[int, Tensor, Tensor]
"""Weight 1 … 255, index_Ck int64, q_Ck int64 (units of 2⁻²⁶; 0: nothing was sent)."""

SLAB_CHUNKS = 256


def outer_update(members: Sequence[Weighted], chunks: int, alpha_256: int, floor_256: int) -> Tensor:
    """U int32 `[chunks, 4096]`, units of 2⁻²⁴, of the members of one round's set, each given once.

    Raises DecodeError for more than 1024 members or a weight outside 1 … 255.
    """
    if len(members) > MAX_SET or not all(1 <= weight <= MAX_WEIGHT for weight, _, _ in members):
        raise DecodeError("a set with too many members, or with an illegal weight")
    update = torch.zeros((chunks, CHUNK), dtype=torch.int32)
    for start in range(0, chunks if members else 0, SLAB_CHUNKS):
        rows = slice(start, min(start + SLAB_CHUNKS, chunks))
        numerator, sent = sums([(w, index[rows], q[rows]) for w, index, q in members])
        share = divisor(sent, sum(weight for weight, _, _ in members), floor_256)
        update[rows] = outer_step(numerator, share, alpha_256).to(torch.int32)
    return update


def sums(members: Sequence[Weighted]) -> tuple[Tensor, Tensor]:
    """int64 `[C, 4096]` twice: Σ weight·q, and the weight of those who sent the coordinate."""
    numerator = torch.zeros((len(members[0][1]), CHUNK), dtype=torch.int64)
    sent = torch.zeros_like(numerator)
    for weight, index, q in members:
        numerator.scatter_add_(1, index, q * weight)
        sent.scatter_add_(1, index, (q != 0) * weight)
    return numerator, sent


def divisor(sent_C4096: Tensor, total: int, floor_256: int) -> Tensor:
    """max(weight that sent the coordinate, ceil(floor_256 · total / 256)), at least 1; int64."""
    return sent_C4096.clamp(min=max(1, -(-floor_256 * total // 256)))


def outer_step(numerator_C4096: Tensor, divisor_C4096: Tensor, alpha_256: int) -> Tensor:
    """−α·mean, int64, units of 2⁻²⁴: q counts quarters of a unit and α_256 counts 256ths."""
    return -round_half_away(numerator_C4096 * alpha_256, divisor_C4096 * (4 * 256))


def round_half_away(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator (> 0) rounded to the nearest integer, halves away from zero; int64."""
    size = (2 * numerator.abs() + denominator).div(2 * denominator, rounding_mode="floor")
    return size * numerator.sign()
