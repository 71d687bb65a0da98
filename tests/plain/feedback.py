"""Error feedback: what a payload could not say is kept and said later (SparseLoCo, arXiv 2508.15706 §2).

    a = β·e + Δ        payload = encode(a)        e' = a − dequantised(payload)

The quantisation error stays in e too, so a coarse quantiser costs time, not bias.
"""

import torch
from torch import Tensor

from atoll.protocols.errors import Divergence
from atoll.protocols.run.payload import VALUE_BITS
from tests.plain.sparse2 import SLAB_CHUNKS, Tables, decode, encode


def feed(residual_C4096: Tensor, delta_C4096: Tensor, beta: float, k: int) -> bytes:
    """Payload of β·e + Δ; `residual_C4096` (float32) becomes e'.

    Raises Divergence for NaN and infinity, with the residual as it was.
    """
    for start in range(0, len(delta_C4096), SLAB_CHUNKS):
        rows = slice(start, start + SLAB_CHUNKS)
        if not bool(torch.add(delta_C4096[rows], residual_C4096[rows], alpha=beta).isfinite().all()):
            raise Divergence("the pseudo-gradient holds NaN or infinity")
    residual_C4096.mul_(beta).add_(delta_C4096)
    payload = encode(residual_C4096, k)
    _add(residual_C4096, decode(payload, len(residual_C4096), k), -1.0)
    return payload


def give_back(residual_C4096: Tensor, payload: bytes, k: int) -> None:
    """Add a payload that missed its final set: late work is late, never lost."""
    _add(residual_C4096, decode(payload, len(residual_C4096), k), 1.0)


def _add(residual_C4096: Tensor, tables: Tables, sign: float) -> None:
    values = tables.q_Ck.to(torch.float32) * (sign * 2.0**-VALUE_BITS)
    residual_C4096.scatter_add_(1, tables.index_Ck, values)
