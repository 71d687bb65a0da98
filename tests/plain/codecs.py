"""Every codec read the slow way, in numpy and whole numbers, from the text of the wire page: q, and who sent."""

import numpy as np
import torch

from atoll.node.compress import bits
from atoll.node.compress.quantise import scale_units
from atoll.node.compress.sparse2 import decode as decode_sparse2
from atoll.protocols.payload import DENSE_BLOCK, MOST_SCALE, TOP_LEVEL, Layout, check_frame


class Refused(Exception):
    """Not a legal payload."""


def decode(payload, codec, chunks, k):
    """`q` int64 `[chunks, 4096]` and bool `[chunks, 4096]`: sent. Raises DecodeError or Refused."""
    if codec == "sparse2":
        return _spread(*decode_sparse2(payload, chunks, k), chunks)
    layout = Layout(codec, chunks, k)
    check_frame(payload, layout)
    sections = [
        np.frombuffer(payload, np.uint8, chunks * row, at).reshape(chunks, row)
        for at, row in zip(layout.offsets, layout.row_bytes, strict=True)
    ]
    return _sparse1(sections, layout) if codec == "sparse1" else _dense(sections, layout)


def _spread(index, q, chunks):
    whole = torch.zeros((chunks, 4096), dtype=torch.int64).scatter_(1, index, q)
    return whole, whole != 0


def _sparse1(sections, layout):
    words, lows, highs, codes = sections
    word = words.copy().view("<u2")[:, 0].astype(np.int64)
    index = bits.unpack_unary(highs, layout.k, layout.high_bits) << layout.low_bits
    index |= bits.unpack_fields(lows, layout.k, layout.low_bits)
    sign = bits.unpack_fields(codes, layout.k, 1)
    for chunk in range(layout.chunks):
        rising = (np.diff(index[chunk]) > 0).all() and index[chunk, -1] < 4096
        empty = not sign[chunk].any() and (index[chunk] == np.arange(layout.k)).all()
        if word[chunk] > MOST_SCALE["sparse1"] or not rising or (word[chunk] == 0 and not empty):
            raise Refused
    units = scale_units(torch.from_numpy(word))[:, None] * 4
    q = torch.where(torch.from_numpy(sign) == 1, -units, units)
    return _spread(torch.from_numpy(index), q, layout.chunks)


def _dense(sections, layout):
    scales, codes = sections
    word = scales.copy().view("<u2").astype(np.int64)
    if layout.codec == "int8":
        level = codes.copy().view(np.int8).astype(np.int64)
        strange = level == -128
    else:
        nibble = np.stack([codes & 15, codes >> 4], axis=2).reshape(layout.chunks, 4096).astype(np.int64)
        level = ((1 << (nibble & 7)) >> 1) * np.where(nibble & 8, -1, 1)
        strange = nibble == 8
    block = DENSE_BLOCK[layout.codec]
    most = np.abs(level).reshape(layout.chunks, -1, block).max(axis=2)
    legal = (word <= MOST_SCALE[layout.codec]) & (most == np.where(word, TOP_LEVEL[layout.codec], 0))
    if strange.any() or not legal.all():
        raise Refused
    units = scale_units(torch.from_numpy(word)).repeat_interleave(block, dim=1)
    return torch.from_numpy(level) * units, units > 0
