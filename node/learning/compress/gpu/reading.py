"""Triton: one chunk of one payload -> places and values; every rule of the wire is held, as in `sparse_fold`."""

import triton.language as tl

from atoll.node.learning.compress.gpu.fitting import high_level, units_of
from atoll.node.learning.kernels.on_gpu import kernel
from atoll.protocols.run.payload import LOW_LEVEL, ONE_FP16, SCALE_MASK, SHAPE_SHIFT

_LOW: tl.constexpr = tl.constexpr(LOW_LEVEL)
_ONE: tl.constexpr = tl.constexpr(ONE_FP16)
_SCALE_MASK: tl.constexpr = tl.constexpr(SCALE_MASK)
_SHAPE_SHIFT: tl.constexpr = tl.constexpr(SHAPE_SHIFT)


@kernel
def read_chunk(
    words: tl.tensor, lows: tl.tensor, highs: tl.tensor, codes: tl.tensor,
    k: tl.constexpr, low_bits: tl.constexpr, high_bits: tl.constexpr, bits_size: tl.constexpr, size: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Place, value q (int32, units of 2⁻²⁶; 0: none), and the faults: bit n for fault n of `sparse_fold`.

    Addresses are those of the chunk's rows of each section. Lane b stands for bit b of the unary indices; the i-th
    set bit is index i. Places of values are within the chunk, whatever the bytes are.
    """
    b = tl.arange(0, bits_size)
    bit = _bits_at(highs, b, 1, (high_bits + 7) // 8 * 8)
    is_set = bit == 1
    i = tl.cumsum(bit, 0) - 1
    here = is_set & (i < k) & (b < high_bits)
    low = _bits_at(lows, tl.where(here, i, 0) * low_bits, low_bits, k * low_bits)
    low_before = _bits_at(lows, tl.maximum(tl.where(here, i, 0) - 1, 0) * low_bits, low_bits, k * low_bits)
    code = _bits_at(codes, tl.where(here, i, 0) * 2, 2, 2 * k)
    place = ((b - i) << low_bits) | low
    word = tl.load(words).to(tl.int32) | (tl.load(words + 1).to(tl.int32) << 8)
    scale, shape = word & _SCALE_MASK, word >> _SHAPE_SHIFT
    units = units_of(scale)
    level = tl.where((code & 1) == 1, high_level(shape), _LOW)
    q = tl.where((code & 2) == 2, -(units * level), units * level)

    follows = (b > 0) & (_bits_at(highs, tl.maximum(b - 1, 0), 1, high_bits) == 1)
    falls = here & ((follows & (low <= low_before)) | (place >= size))
    padded = (
        _padding(lows, k * low_bits) + _padding(codes, 2 * k) + tl.sum((is_set & (b >= high_bits)).to(tl.int32), 0)
    )
    large = tl.sum((here & ((code & 1) == 1)).to(tl.int32), 0)
    strange = tl.sum((here & ((code != 0) | (place != i))).to(tl.int32), 0)
    faults = (scale > _ONE).to(tl.int32) << 1
    faults |= (tl.sum((is_set & (b < high_bits)).to(tl.int32), 0) != k).to(tl.int32) << 2
    faults |= (tl.sum(falls.to(tl.int32), 0) > 0).to(tl.int32) << 3
    faults |= ((large == k) | ((large == 0) & (shape > 0))).to(tl.int32) << 4
    faults |= ((scale == 0) & (strange > 0)).to(tl.int32) << 5
    faults |= (padded > 0).to(tl.int32) << 6
    return place, tl.where(here & (place < size), q, 0), faults


@kernel
def _bits_at(row: tl.tensor, bit: tl.tensor, width: tl.constexpr, end: tl.constexpr) -> tl.tensor:
    """Fields of `width` ≤ 12 bits from `bit` on, of a row whose bits end at `end`."""
    byte = bit >> 3
    held = tl.load(row + byte, mask=bit < end, other=0).to(tl.int32)
    if width > 1:
        held |= tl.load(row + byte + 1, mask=byte * 8 + 8 < end, other=0).to(tl.int32) << 8
    if width > 9:
        held |= tl.load(row + byte + 2, mask=byte * 8 + 16 < end, other=0).to(tl.int32) << 16
    return (held >> (bit & 7)) & ((1 << width) - 1)


@kernel
def _padding(row: tl.tensor, bits: tl.constexpr) -> tl.tensor:
    """What lies behind the bits of a row in its last byte."""
    if bits % 8 == 0:
        return tl.full((), 0, tl.int32)
    else:
        return tl.load(row + bits // 8).to(tl.int32) >> (bits % 8)
