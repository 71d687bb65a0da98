"""Fixed point: master weights are int32 with step 2⁻²⁴; leaving the range is Divergence, never saturation."""

import numpy as np
import torch
from torch import Tensor

from atoll.node.learning.kernels.large import fresh_like
from atoll.node.learning.outer.adding import add
from atoll.protocols.errors import MODEL_LOST, Divergence
from atoll.protocols.ids import Digest, digest
from atoll.protocols.ledger.coverage import Cover, size_of
from atoll.protocols.run.arena import Span

FRACTION_BITS = 24
SLAB_CHUNKS = 256
_DOMAIN = b"atoll/state/1\0"
_LOW, _HIGH = -(2**31), 2**31 - 1


def to_fixed(values: Tensor) -> Tensor:
    """int32 of float32, to the nearest step, halves to even. Raises Divergence outside ±128 and for NaN."""
    scaled = (values.double() * 2.0**FRACTION_BITS).round()
    if not bool(((scaled >= _LOW) & (scaled <= _HIGH)).all()):
        raise Divergence("a weight is NaN or outside -128 … 128")
    return scaled.to(torch.int32)


def to_float(theta: Tensor) -> Tensor:
    """float32 of int32, to the nearest float32 (IEEE, halves to even); exact below 1."""
    return theta.to(torch.float32) * 2.0**-FRACTION_BITS


def plus(
    theta_C4096: Tensor, gain_N4096: Tensor, loss_N4096: Tensor | None = None, *, cover: Cover | None = None
) -> Tensor:
    """θ + gain − loss, a new int32 array; only the result must fit. Raises Divergence on overflow.

    Gain and loss are int32 and hold the rows of `cover`; without one, all rows. The other rows of θ stay.
    """
    cover = (Span(0, len(theta_C4096)),) if cover is None else cover
    full = size_of(cover) == len(theta_C4096)
    out = fresh_like(theta_C4096)
    if not full:
        out.copy_(theta_C4096)
    first = 0
    for span in cover:
        rows, terms = slice(span.start, span.stop), slice(first, first + span.stop - span.start)
        loss = None if loss_N4096 is None else loss_N4096[terms]
        if not add(out[rows], theta_C4096[rows], gain_N4096[terms], loss):
            raise Divergence("a weight left its range of -128 … 128", hint=MODEL_LOST)
        first = terms.stop
    return out


def state_digest(theta_C4096: Tensor) -> Digest:
    """BLAKE3 over a header (domain, chunk count) and the little-endian int32 arena."""
    array = theta_C4096.contiguous().numpy().astype("<i4", copy=False)
    header = _DOMAIN + len(theta_C4096).to_bytes(8, "little")
    return digest(header, array.reshape(-1).view(np.uint8).data)
