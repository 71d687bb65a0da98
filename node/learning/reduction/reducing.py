"""A reducer's work on its slice: the exact mean of what it covers, compressed; the rest is its error feedback.

    a = kept + round(Σ weight·q / divisor)      payload = encode(a)      kept' = a - decoded(payload)

All in integers of 2⁻²⁶, so that anybody who knows `kept` and the rows gets the same bits. `kept` stays within
int32: what would leave it is cut off at ±32, by everybody alike. Error feedback at the aggregator: "1-bit
DoubleSqueeze", arXiv 1905.05957; here over sparse sums, with the divisor of the round.

The fold then takes the outer step of a slice from the reduction, with the weight of what it covers, and the rest
raw.

`Arithmetic` is what a reduction needs of the codec and of the mean. It is handed in, because learning's leaf
rooms do not import each other.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.protocols.errors import DecodeError
from atoll.protocols.ids import Digest
from atoll.protocols.ledger.reduction import KEPT_BYTES, ReductionRules
from atoll.protocols.ledger.rows import join_rows, row_bytes, silent_row, split_rows
from atoll.protocols.merkle import leaf_of
from atoll.protocols.run.arena import CHUNK, Span
from atoll.protocols.run.payload import VALUE_BITS

Weighted = tuple[int, Tensor, Tensor]
"""Weight, index_Ck int64, q_Ck int64 (units of 2⁻²⁶; 0: nothing was sent)."""
_LOW, _HIGH = -(2**31), 2**31 - 1


class Arithmetic(NamedTuple):
    """The agreed arithmetic of a round."""

    encode: Callable[[Tensor, int], bytes]
    """Payload of float32 `[C, 4096]` with k values per chunk; the same bytes on every machine."""
    decode: Callable[[bytes | memoryview, int, int], tuple[Tensor, Tensor]]
    """index_Ck and q_Ck, int64, of a payload of `sparse2`, its chunks and its k. Raises DecodeError."""
    weighted_mean: Callable[[Sequence[Weighted], int], Tensor]
    """Mean of members with a floor_256: int64 `[C, 4096]`, units of 2⁻²⁶."""
    outer_update: Callable[[Sequence[Weighted], int, int, int], Tensor]
    """U int32 `[C, 4096]`, units of 2⁻²⁴, of members, chunks, alpha_256 and floor_256."""


def decode_rows(rows: bytes, k: int, arithmetic: Arithmetic) -> tuple[Tensor, Tensor]:
    """index_Ck and q_Ck of a contributor's rows; a row that is not legal counts as silent."""
    payload = join_rows(rows, k)
    chunks = len(rows) // row_bytes(k)
    try:
        return arithmetic.decode(payload, chunks, k)
    except DecodeError:
        # Row by row, only now: the signed root vouches for illegal rows too, so they need one agreed meaning.
        each = [row if _is_legal(row, k, arithmetic) else silent_row(k) for row in split_rows(rows, k)]
        return arithmetic.decode(join_rows(b"".join(each), k), chunks, k)


def _is_legal(row: bytes, k: int, arithmetic: Arithmetic) -> bool:
    try:
        arithmetic.decode(join_rows(row, k), 1, k)
    except DecodeError:
        return False
    return True


class ReducerErrorFeedback(NamedTuple):
    """A reducer's error feedback on the chunks of its slice."""

    span: Span
    values_C4096: Tensor
    """Values, int32, units of 2⁻²⁶."""


def nothing_kept(span: Span) -> ReducerErrorFeedback:
    """Error feedback of a reducer that is new to its slice: zeros."""
    return ReducerErrorFeedback(span, torch.zeros((span.chunks, CHUNK), dtype=torch.int32))


def reduce_rows(
    kept_C4096: Tensor, members: Sequence[Weighted], k: int, floor_256: int, arithmetic: Arithmetic
) -> tuple[bytes, Tensor]:
    """Payload of kept + mean, and what remains, int32. `members` are not empty; `kept_C4096` is not changed."""
    # Clamped before and after encoding: everybody who recomputes a chunk cuts off the same values at ±32.
    wanted = arithmetic.weighted_mean(members, floor_256).add_(kept_C4096).clamp_(_LOW, _HIGH)
    payload = arithmetic.encode(wanted.to(torch.float32).mul_(2.0**-VALUE_BITS), k)
    index, q = arithmetic.decode(payload, len(wanted), k)
    return payload, wanted.scatter_add_(1, index, -q).clamp_(_LOW, _HIGH).to(torch.int32)


def slice_update(
    chunks: int,
    raw: Sequence[tuple[int, bytes]],
    reduced: Sequence[tuple[int, bytes | memoryview]],
    rules: ReductionRules,
    alpha_256: int,
    arithmetic: Arithmetic,
) -> Tensor:
    """U int32 `[chunks, 4096]`, units of 2⁻²⁴, of rows of contributions and the payload of a Reduction, if any.

    `raw`, `reduced`: weights and bytes. Raises DecodeError for an illegal reduced payload.
    """
    members: list[Weighted] = [(weight, *decode_rows(rows, rules.k, arithmetic)) for weight, rows in raw]
    members += [(weight, *arithmetic.decode(payload, chunks, rules.reduced_k)) for weight, payload in reduced]
    return arithmetic.outer_update(members, chunks, alpha_256, rules.floor_256)


def moved(kept: ReducerErrorFeedback, span: Span) -> tuple[ReducerErrorFeedback, ReducerErrorFeedback]:
    """Split error feedback when a reducer's slice becomes `span`: what stays, and what it hands to its node.

    The second has the old span, with zeros where chunks stayed.
    """
    new, rest = nothing_kept(span), ReducerErrorFeedback(kept.span, kept.values_C4096.clone())
    start, stop = max(span.start, kept.span.start), min(span.stop, kept.span.stop)
    if start < stop:
        old = slice(start - kept.span.start, stop - kept.span.start)
        new.values_C4096[start - span.start : stop - span.start] = kept.values_C4096[old]
        rest.values_C4096[old] = 0
    return new, rest


def minus(kept: ReducerErrorFeedback, other: ReducerErrorFeedback) -> ReducerErrorFeedback:
    """Difference of two of one span, within int32."""
    # int64: the difference of two int32 may need 33 bits
    values = kept.values_C4096.to(torch.int64) - other.values_C4096
    return ReducerErrorFeedback(kept.span, values.clamp_(_LOW, _HIGH).to(torch.int32))


def hand_back(residual_C4096: Tensor, rest: ReducerErrorFeedback) -> None:
    """Add error feedback that a reducer gives up to its node's own, float32: late, not lost."""
    rows = residual_C4096[rest.span.start : rest.span.stop]
    rows.add_(rest.values_C4096.to(rows.device, torch.float32), alpha=2.0**-VALUE_BITS)


def kept_bytes(values_4096: Tensor) -> bytes:
    """Wire form of one chunk: little-endian int32."""
    return values_4096.numpy().astype("<i4", copy=False).tobytes()


def kept_leaves(values_C4096: Tensor) -> list[Digest]:
    """Leaves of the tree that `Reduction.kept` is the root of."""
    view = memoryview(kept_bytes(values_C4096))
    return [leaf_of(view[at : at + KEPT_BYTES]) for at in range(0, len(view), KEPT_BYTES)]
