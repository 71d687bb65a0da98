"""Triton: the best scale, shape and split of the chosen values, exactly as compress/selecting does.

The sums of sizes in rising order are float64, and their order is part of the answer. So sizes lie by rank, and one
lane takes one chunk and adds them one after the other.
"""

import triton.language as tl

from atoll.node.learning.kernels.on_gpu import kernel, kernel_for_any
from atoll.protocols.run.payload import HIGH_LEVELS, LOW_LEVEL, SHAPE_SHIFT

_LOW: tl.constexpr = tl.constexpr(LOW_LEVEL)
_SHAPES: tl.constexpr = tl.constexpr(len(HIGH_LEVELS))
_HIGH_0: tl.constexpr = tl.constexpr(HIGH_LEVELS[0])
_HIGH_1: tl.constexpr = tl.constexpr(HIGH_LEVELS[1])
_HIGH_2: tl.constexpr = tl.constexpr(HIGH_LEVELS[2])
_HIGH_3: tl.constexpr = tl.constexpr(HIGH_LEVELS[3])
_SHAPE_SHIFT: tl.constexpr = tl.constexpr(SHAPE_SHIFT)


@kernel_for_any("chunks")
def fit(
    order: tl.tensor, word: tl.tensor, bar: tl.tensor, chunks: tl.tensor, k: tl.constexpr, lanes: tl.constexpr
) -> None:
    """Word of each chunk, and the bits above which its values are large; int32 `[chunks]`.

    `norm`, Σ level² with one more value small at each step, is a whole number: its sums are exact.
    """
    c = tl.program_id(0).to(tl.int64) * lanes + tl.arange(0, lanes)
    here = c < chunks
    # Added in rising order of size, as on the CPU: float64 sums in another order have other bits.
    total = tl.zeros((lanes,), tl.float64)
    for r in range(k):
        total += _size(order, r, chunks, c, here)
    nothing = tl.zeros((lanes,), tl.int32)
    most, best_dot, best_norm = tl.full((lanes,), -1.0, tl.float64), total, total
    shape, split = nothing, nothing
    for s in range(_SHAPES):
        high = high_level(nothing + s).to(tl.float64)
        small, norm = tl.zeros((lanes,), tl.float64), high * high * k
        for r in range(k):
            small += _size(order, r, chunks, c, here)
            dot = small * _LOW + high * (total - small)
            norm = norm - high * high + _LOW * _LOW
            gain = dot * dot / norm
            # strictly: a tie stays with the lower shape and the fewer small values
            better = gain > most
            most, shape, split = (
                tl.where(better, gain, most),
                tl.where(better, s, shape),
                tl.where(better, r, split),
            )
            best_dot, best_norm = tl.where(better, dot, best_dot), tl.where(better, norm, best_norm)
    half = half_bits(best_dot * 4.0 / best_norm)
    edge = tl.load(order + split.to(tl.int64) * chunks + c, mask=here, other=0)
    any_large = (half != 0) & (tl.load(order + (k - 1) * chunks + c, mask=here, other=0) > edge)
    tl.store(word + c, tl.where(any_large, half | (shape << _SHAPE_SHIFT), half), mask=here)
    tl.store(bar + c, edge, mask=here)


@kernel
def _size(order: tl.tensor, r: tl.tensor, chunks: tl.tensor, c: tl.tensor, here: tl.tensor) -> tl.tensor:
    bits = tl.load(order + tl.cast(r, tl.int64) * chunks + c, mask=here, other=0)
    return bits.to(tl.float32, bitcast=True).to(tl.float64)


@kernel
def high_level(shape: tl.tensor) -> tl.tensor:
    """The large level of a shape."""
    first = tl.where(shape == 0, _HIGH_0, _HIGH_1)
    last = tl.where(shape == 2, _HIGH_2, _HIGH_3)
    return tl.where(shape < 2, first, last)


@kernel
def half_bits(scale: tl.tensor) -> tl.tensor:
    """Bits of the fp16 nearest to a float64 ≥ 0, halves to even, through float32; at most 1.0."""
    # Through float32, as on the host: rounding once instead of twice would give other bits in rare cases.
    bits = tl.minimum(scale, 1.0).to(tl.float32).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 127
    mantissa = (bits & 0x7FFFFF) | 0x800000
    # Lanes below the range are set to 0 at the end; until then their shift must stay legal.
    drop = tl.where(exponent >= -14, 13, tl.minimum(-1 - exponent, 24))
    kept, middle = mantissa >> drop, 1 << (drop - 1)
    rest = mantissa & ((middle << 1) - 1)
    kept += ((rest > middle) | ((rest == middle) & ((kept & 1) == 1))).to(tl.int32)
    half = tl.where(exponent >= -14, kept + ((exponent + 14) << 10), kept)
    return tl.where(exponent < -25, 0, half)


@kernel
def units_of(half: tl.tensor) -> tl.tensor:
    """An fp16 scale in units of 2⁻²⁴; int32."""
    exponent, fraction = half >> 10, half & 0x3FF
    return tl.where(exponent > 0, (fraction + 1024) << tl.maximum(exponent - 1, 0), fraction)
