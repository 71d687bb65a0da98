"""The outer step of one slice from what counts in it: a reduction with the weight of what it covers, the rest raw.

The bounds of `aggregate/mean.py` hold: all weights together are those of at most 1024 members.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.node.learning.reduction.arithmetic import Arithmetic, Weighted, decode_rows
from atoll.protocols.ledger.reduction import ReductionRules
from atoll.protocols.run.arena import CHUNK

SLAB_CHUNKS = 256


def slice_update(
    chunks: int,
    raw: Sequence[tuple[int, bytes]],
    reduced: Sequence[tuple[int, bytes | memoryview]],
    rules: ReductionRules,
    alpha_256: int,
    arithmetic: Arithmetic,
) -> Tensor:
    """U int32 `[chunks, 4096]`, units of 2⁻²⁴, of rows of contributions and the payload of a Reduction, if any.

    `raw`, `reduced`: weights and bytes.

    Raises DecodeError for an illegal reduced payload.
    """
    members: list[Weighted] = [(weight, *decode_rows(rows, rules.k, arithmetic)) for weight, rows in raw]
    for weight, payload in reduced:
        members.append((weight, *arithmetic.decode(payload, chunks, rules.reduced_k)))
    total = sum(weight for weight, _, _ in members)
    update = torch.zeros((chunks, CHUNK), dtype=torch.int32)
    for start in range(0, chunks if members else 0, SLAB_CHUNKS):
        rows = slice(start, min(start + SLAB_CHUNKS, chunks))
        numerator, sent = arithmetic.sums([(weight, index[rows], q[rows]) for weight, index, q in members])
        share = arithmetic.divisor(sent, total, rules.floor_256)
        update[rows] = arithmetic.step(numerator, share, alpha_256).to(torch.int32)
    return update
