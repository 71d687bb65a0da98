"""Triton: what is sent of the chosen values leaves e and becomes the bytes of a payload."""

import triton.language as tl

from atoll.node.learning.compress.gpu.choosing import magnitudes
from atoll.node.learning.compress.gpu.fitting import high_level, units_of
from atoll.node.learning.kernels.on_gpu import kernel_for_any
from atoll.protocols.run.payload import LOW_LEVEL, SCALE_MASK, SHAPE_SHIFT, VALUE_BITS

_LOW: tl.constexpr = tl.constexpr(LOW_LEVEL)
_SCALE_MASK: tl.constexpr = tl.constexpr(SCALE_MASK)
_SHAPE_SHIFT: tl.constexpr = tl.constexpr(SHAPE_SHIFT)
_UNIT: tl.constexpr = tl.constexpr(2.0**-VALUE_BITS)


@kernel_for_any("first", "chunks")
def subtract_sent(
    out: tl.tensor, place: tl.tensor, value: tl.tensor, word: tl.tensor, bar: tl.tensor, code: tl.tensor,
    unary: tl.tensor, first: tl.tensor, chunks: tl.tensor,
    k: tl.constexpr, low_bits: tl.constexpr, high_bits: tl.constexpr, size: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    """Codes `[chunks, k]` and unary bits `[chunks, high_bits]`, a byte each; what they send leaves `out`.

    A chunk of scale 0 sends nothing: its places become 0 … k − 1. `out` holds a of chunks from `first` on.
    """
    n = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    here = n < chunks * k
    row, i = n // k, (n % k).to(tl.int32)
    sent = tl.load(word + row, mask=here, other=0)
    live = here & ((sent & _SCALE_MASK) != 0)
    a = tl.load(value + n, mask=here, other=0.0)
    large = live & (magnitudes(a) > tl.load(bar + row, mask=here, other=0))
    negative = live & (a.to(tl.int32, bitcast=True) < 0)
    level = tl.where(large, high_level(sent >> _SHAPE_SHIFT), _LOW)
    # level·units is a whole number that a float32 holds exactly, as on the host
    step = (units_of(sent & _SCALE_MASK) * level).to(tl.float32) * _UNIT
    at = tl.where(live, tl.load(place + n, mask=here, other=0), i)
    tl.store(out + (first + row) * size + at, tl.where(negative, a + step, a - step), mask=live)
    tl.store(place + n, at, mask=here)
    tl.store(code + n, (large.to(tl.int32) | (negative.to(tl.int32) << 1)).to(tl.uint8), mask=here)
    # The places of a chunk are distinct, so no two lanes write one byte of `unary`.
    tl.store(unary + row * high_bits + (at >> low_bits) + i, tl.full((block,), 1, tl.uint8), mask=here)


@kernel_for_any("rows", anywhere=("out",))
def pack(
    source: tl.tensor, out: tl.tensor, rows: tl.tensor,
    fields: tl.constexpr, width: tl.constexpr, row_bytes: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    """The low `width` bits of `source` `[rows, fields]`, one after the other; each row begins with a byte."""
    n = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    here = n < rows * row_bytes
    row, first = n // row_bytes, (n % row_bytes).to(tl.int32) * 8
    # Each lane makes one byte of the payload from the fields that reach into it: no two lanes share a byte.
    byte = tl.zeros((block,), tl.int32)
    for j in tl.static_range(8):
        bit = first + j
        field = bit // width
        held = tl.load(source + row * fields + field, mask=here & (field < fields), other=0).to(tl.int32)
        byte |= ((held >> (bit - field * width)) & 1) << j
    tl.store(out + n, byte.to(tl.uint8), mask=here)
