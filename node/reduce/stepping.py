"""The outer step of one slice from what counts in it: a reduction with the weight of what it covers, the rest raw.

The bounds of `aggregate/mean.py` hold: all weights together are those of at most 1024 members.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from atoll.node.reduce.arithmetic import Arithmetic, Weighted, decode_rows
from atoll.node.reduce.effective import Effective
from atoll.protocols.arena import CHUNK
from atoll.protocols.ids import Digest
from atoll.protocols.reduction import ReductionRules
from atoll.protocols.spans import Span

SLAB_CHUNKS = 256

RawRows = Callable[[Digest, Span], bytes]
"""Verified rows of a contribution."""
Reduced = Callable[[Digest], bytes]
"""Verified payload of a Reduction."""


def slice_update(
    part: Effective, rules: ReductionRules, alpha_256: int, raw: RawRows, reduced: Reduced, arithmetic: Arithmetic
) -> Tensor:
    """U int32 `[span, 4096]`, units of 2⁻²⁴. Raises DecodeError for an illegal reduced payload."""
    chunks = part.span.chunks
    members: list[Weighted] = [
        (offer.weight, *decode_rows(raw(offer.entry, part.span), rules.k, arithmetic)) for offer in part.raw
    ]
    if part.reduced is not None:
        payload = reduced(part.reduced.entry)
        members.append((part.weight, *arithmetic.decode(payload, chunks, rules.reduced_k)))
    total = sum(weight for weight, _, _ in members)
    update = torch.zeros((chunks, CHUNK), dtype=torch.int32)
    for start in range(0, chunks if members else 0, SLAB_CHUNKS):
        rows = slice(start, min(start + SLAB_CHUNKS, chunks))
        numerator, sent = arithmetic.sums([(weight, index[rows], q[rows]) for weight, index, q in members])
        share = arithmetic.divisor(sent, total, rules.floor_256)
        update[rows] = arithmetic.step(numerator, share, alpha_256).to(torch.int32)
    return update
