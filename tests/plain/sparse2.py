"""Codec `sparse2`: a `[C, 4096]` float32 array <-> payload bytes. Layout: atoll.protocols.run.payload.

Work goes through slabs of chunks, so that beside input and output only a few MiB are needed.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from atoll.protocols.errors import DecodeError, Divergence
from atoll.protocols.run.arena import CHUNK
from atoll.protocols.run.payload import ONE_FP16, SCALE_MASK, SHAPE_SHIFT, VALUE_BITS, Layout, check_frame
from tests.plain import bits
from tests.plain.quantise import fit, levels
from tests.plain.select import top_k

SLAB_CHUNKS = 256
"""1 Mi values: 16 MiB of temporaries while values are chosen."""


class Tables(NamedTuple):
    """A decoded payload."""

    index_Ck: Tensor
    """int64 `[C, k]`, rising, 0 … 4095."""
    q_Ck: Tensor
    """int64 `[C, k]`, units of 2⁻²⁶. A row of zeros says that the author sends nothing of this chunk."""


def encode(values_C4096: Tensor, k: int) -> bytes:
    """Payload of finite float32 values `[C, 4096]`. Raises Divergence for NaN and infinity."""
    layout = Layout("sparse2", len(values_C4096), k)
    starts = range(0, layout.chunks, SLAB_CHUNKS)
    slabs = [_encode_slab(values_C4096[start : start + SLAB_CHUNKS], layout) for start in starts]
    return layout.header + b"".join(part for section in zip(*slabs, strict=True) for part in section)


def decode(payload: bytes | memoryview, chunks: int, k: int) -> Tables:
    """Tables of the one legal payload that these bytes are. Raises DecodeError, nothing else."""
    layout = Layout("sparse2", chunks, k)
    check_frame(payload, layout)
    index = torch.empty((chunks, k), dtype=torch.int64)
    q = torch.empty_like(index)
    for start in range(0, chunks, SLAB_CHUNKS):
        stop = min(start + SLAB_CHUNKS, chunks)
        index[start:stop], q[start:stop] = _decode_slab(payload, layout, start, stop)
    return Tables(index, q)


def dequantise(index_Ck: Tensor, q_Ck: Tensor, chunks: int) -> Tensor:
    """float32 `[chunks, 4096]`, exact: a `q` has at most 15 significant bits."""
    values = q_Ck.to(torch.float32) * 2.0**-VALUE_BITS
    return torch.zeros((chunks, CHUNK)).scatter_(1, index_Ck, values)


def _encode_slab(slab: Tensor, layout: Layout) -> tuple[bytes, bytes, bytes, bytes]:
    if not bool(slab.isfinite().all()):
        raise Divergence("the pseudo-gradient holds NaN or infinity")
    index = top_k(slab, layout.k)
    word, code = fit(slab.gather(1, index))
    silent = (word & SCALE_MASK) == 0
    index = torch.where(silent[:, None], torch.arange(layout.k), index)
    at = index.numpy()
    return (
        word.numpy().astype("<u2").tobytes(),
        bits.pack_fields(at, layout.low_bits).tobytes(),
        bits.pack_unary(at >> layout.low_bits, layout.high_bits).tobytes(),
        bits.pack_fields(code.numpy().astype(np.int64), 2).tobytes(),
    )


def _decode_slab(payload: bytes | memoryview, layout: Layout, start: int, stop: int) -> tuple[Tensor, Tensor]:
    words, lows, highs, codes = (
        np.frombuffer(payload, np.uint8, (stop - start) * row, offset + start * row).reshape(stop - start, row)
        for offset, row in zip(layout.offsets, layout.row_bytes, strict=True)
    )
    word = words.view("<u2")[:, 0].astype(np.int64)
    index = bits.unpack_unary(highs, layout.k, layout.high_bits) << layout.low_bits
    index |= bits.unpack_fields(lows, layout.k, layout.low_bits)
    code = bits.unpack_fields(codes, layout.k, 2)
    _check(word, index, code)
    word_C, code_Ck = torch.from_numpy(word), torch.from_numpy(code)
    return torch.from_numpy(index), levels(word_C, code_Ck)


def _check(word: bits.Ints, index: bits.Ints, code: bits.Ints) -> None:
    """Raise DecodeError for everything that `encode` never writes."""
    scale, shape = word & SCALE_MASK, word >> SHAPE_SHIFT
    if np.any(scale > ONE_FP16):
        raise DecodeError("payload: a scale above 1")
    if np.any(index[:, -1] >= CHUNK) or np.any(index[:, 1:] <= index[:, :-1]):
        raise DecodeError("payload: indices do not rise within the chunk")
    large = (code & 1).astype(bool)
    if large.all(axis=1).any() or np.any(shape[~large.any(axis=1)]):
        raise DecodeError("payload: a chunk without small values, or a shape that nothing uses")
    silent = scale == 0
    if np.any(code[silent]) or np.any(index[silent] != np.arange(index.shape[1])):
        raise DecodeError("payload: a chunk of scale 0 is not in its one form")
