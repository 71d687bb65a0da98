"""Fixed point: master weights are int32 with step 2⁻²⁴; leaving the range is Divergence, never saturation.

The padding of the arena, values that belong to no atom, stays zero in every state.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from atoll.node.learning.kernels.compiled import Fresh, Ints32, compiled, fresh_like
from atoll.protocols.errors import MODEL_LOST, Divergence
from atoll.protocols.ids import Digest, digest
from atoll.protocols.ledger.coverage import Cover, size_of
from atoll.protocols.run.arena import CHUNK, SIDE, Arena, Span, edges

FRACTION_BITS = 24
SLAB_CHUNKS = 256
"""4 MiB of int32: what is at hand of an array that is cleared part by part."""
_DOMAIN = b"atoll/state/1\0"
_LOW, _HIGH = -(2**31), 2**31 - 1


def to_fixed(values: Tensor) -> Tensor:
    """int32 of float32, to the nearest step, halves to even. Raises Divergence outside ±128 and for NaN."""
    # float64 has 53 bits: the product is exact, and only `round` rounds, the same way on every machine.
    scaled = (values.double() * 2.0**FRACTION_BITS).round()
    if not bool(((scaled >= _LOW) & (scaled <= _HIGH)).all()):
        raise Divergence("a weight is NaN or outside -128 … 128")
    return scaled.to(torch.int32)


def to_float(theta: Tensor) -> Tensor:
    """float32 of int32, to the nearest float32 (IEEE, halves to even); exact below 1."""
    return theta.to(torch.float32) * 2.0**-FRACTION_BITS


def plus(
    theta_C4096: Tensor,
    gain_N4096: Tensor,
    loss_N4096: Tensor | None = None,
    *,
    cover: Cover | None = None,
    fresh: Fresh = fresh_like,
) -> Tensor:
    """θ + gain − loss, a new int32 array; only the result must fit. Raises Divergence on overflow.

    Gain and loss are int32 and hold the rows of `cover`; without one, all rows. The other rows of θ stay.
    """
    cover = (Span(0, len(theta_C4096)),) if cover is None else cover
    # Rows outside the cover are copied only where there are some; a whole round writes each value once.
    full = size_of(cover) == len(theta_C4096)
    out = fresh(theta_C4096)
    if not full:
        out.copy_(theta_C4096)
    first = 0
    for span in cover:
        rows, terms = slice(span.start, span.stop), slice(first, first + span.stop - span.start)
        # int64 inside: view + gain may leave int32 where view + gain − loss does not.
        loss = None if loss_N4096 is None else loss_N4096[terms]
        if not _add(out[rows], theta_C4096[rows], gain_N4096[terms], loss):
            raise Divergence("a weight left its range of -128 … 128", hint=MODEL_LOST)
        first = terms.stop
    return out


def _add(out: Tensor, theta: Tensor, gain: Tensor, loss: Tensor | None) -> bool:
    """out ← θ + gain − loss, int32 of one size; False where a sum does not fit, and `out` is then undefined."""
    into, first, second = (part.numpy().reshape(-1) for part in (out, theta.contiguous(), gain.contiguous()))
    if loss is None:
        return bool(_sum(into, first, second))
    return bool(_sum_less(into, first, second, loss.contiguous().numpy().reshape(-1)))


# Two kernels, because a test for a missing term inside the loop would keep it from being vectorised.
@compiled
def _sum(out: Ints32, theta: Ints32, gain: Ints32) -> bool:
    wrong = np.int64(0)
    for i in range(len(out)):
        total = np.int64(theta[i]) + np.int64(gain[i])
        out[i] = np.int32(total)
        # What the narrowing changed, gathered without a branch: 0 in the end means that every sum fitted.
        wrong |= total ^ np.int64(out[i])
    return bool(wrong == 0)


@compiled
def _sum_less(out: Ints32, theta: Ints32, gain: Ints32, loss: Ints32) -> bool:
    wrong = np.int64(0)
    for i in range(len(out)):
        total = np.int64(theta[i]) + np.int64(gain[i]) - np.int64(loss[i])
        out[i] = np.int32(total)
        wrong |= total ^ np.int64(out[i])
    return bool(wrong == 0)


def state_digest(theta_C4096: Tensor) -> Digest:
    """BLAKE3 over a header (domain, chunk count) and the little-endian int32 arena."""
    # The chunk count is hashed too, so that no two layouts share a digest; the byte order is fixed.
    array = theta_C4096.contiguous().numpy().astype("<i4", copy=False)
    return digest(state_header(len(theta_C4096)), array.reshape(-1).view(np.uint8).data)


def state_header(chunks: int) -> bytes:
    """What is hashed before the values of a state."""
    return _DOMAIN + chunks.to_bytes(8, "little")


class Padding(NamedTuple):
    """The chunks that hold padding, and which of their values are real."""

    chunk_P: Tensor
    """Numbers of the chunks, int64, rising."""
    real_P4096: Tensor
    """True where a value is real, bool."""


def padding_of(arena: Arena) -> Padding:
    """Padding of a layout; a pure function of the RunSpec."""
    # Only chunks at the edge of an atom hold padding, so a state is cleaned without a mask of its own size.
    found = edges(arena)
    at = torch.arange(CHUNK)
    rows, cols, values = (
        torch.tensor([getattr(edge, name) for edge in found], dtype=torch.int64)[:, None]
        for name in ("rows", "cols", "values")
    )
    real = (at // SIDE < rows) & (at % SIDE < cols) & (at < values)
    return Padding(torch.tensor([edge.chunk for edge in found], dtype=torch.int64), real)


def clear(values_N4096: Tensor, padding: Padding, first: int = 0) -> Tensor:
    """Set the padding of the rows of chunks `first …` to zero, in place, on any device; returns the array."""
    # `chunk_P` rises, so the chunks of a slab are one range of it.
    ends = torch.tensor([first, first + len(values_N4096)])
    low, high = torch.searchsorted(padding.chunk_P, ends).tolist()
    at, real = (each[low:high].to(values_N4096.device) for each in padding)
    values_N4096[at - first] = torch.where(real, values_N4096[at - first], 0)
    return values_N4096
