"""Triton: the best scale, shape and split of the chosen values, exactly as compress/selecting does.

The sums of sizes in rising order are float64, and their order is part of the answer. Where no size is 2²⁰ times
another all sums are exact, so any order gives them; other chunks are added one value after the other.
"""

import triton.language as tl

from atoll.node.learning.kernels.on_gpu import kernel
from atoll.protocols.run.payload import HIGH_LEVELS, LOW_LEVEL

_LOW: tl.constexpr = tl.constexpr(LOW_LEVEL)
_SHAPES: tl.constexpr = tl.constexpr(len(HIGH_LEVELS))
_HIGH_0: tl.constexpr = tl.constexpr(HIGH_LEVELS[0])
_HIGH_1: tl.constexpr = tl.constexpr(HIGH_LEVELS[1])
_HIGH_2: tl.constexpr = tl.constexpr(HIGH_LEVELS[2])
_HIGH_3: tl.constexpr = tl.constexpr(HIGH_LEVELS[3])
_EXACT_OCTAVES: tl.constexpr = tl.constexpr(20)
"""512 sizes of 24 bits, spread over so many octaves, have sums below 2⁵³ units of the smallest one's last bit."""


@kernel
def fit(order: tl.tensor, number: tl.tensor, top: tl.tensor, k: tl.constexpr, padded: tl.constexpr) -> tl.tensor:
    """Bits of the scale, shape, and bits above which values are large, of sizes `order` `[k]`, rising bits.

    `top` is the largest of them. `padded`: k or a power of two above it.
    """
    o = tl.arange(0, padded)
    small = _size(tl.load(order + o, mask=o < k, other=0, cache_modifier=".cg"))
    least = tl.load(order, cache_modifier=".cg")
    if (top >> 23) - tl.maximum(least >> 23, 1) <= _EXACT_OCTAVES:
        total = tl.sum(small, 0)
        small = tl.cumsum(small, 0)
    else:
        total = _size(least)
        small = tl.where(o == 0, total, 0.0)
        # A bound that the compiler does not know: written out, this loop would cost all chunks registers.
        for r in range(1, tl.minimum(number, k)):
            total += _size(tl.load(order + r, cache_modifier=".cg"))
            small = tl.where(o == r, total, small)
    # One row for each shape, as many lanes as there are quotients.
    s = tl.arange(0, _SHAPES)[:, None]
    high, low_count = high_level(s), o[None, :] + 1
    # Σ level² is a whole number, which float64 holds exactly.
    norm = (low_count * (_LOW * _LOW) + high * high * (k - low_count)).to(tl.float64)
    dot = small[None, :] * _LOW + high.to(tl.float64) * (total - small[None, :])
    norm = tl.where(low_count <= k, norm, 1.0)
    gain = tl.where(low_count <= k, dot * dot / norm, -1.0)
    which = tl.broadcast_to(s * padded + o[None, :], (_SHAPES, padded))
    lanes: tl.constexpr = _SHAPES * padded
    _, best, dot, norm = tl.reduce(
        (
            tl.reshape(gain, (lanes,)),
            tl.reshape(which, (lanes,)),
            tl.reshape(dot, (lanes,)),
            tl.reshape(norm, (lanes,)),
        ),
        0,
        _better,
    )
    edge = tl.load(order + best % padded, cache_modifier=".cg")
    return half_bits(dot * 4.0 / norm), best // padded, edge


@kernel
def _better(
    gain: tl.tensor, number: tl.tensor, dot: tl.tensor, norm: tl.tensor,
    gain2: tl.tensor, number2: tl.tensor, dot2: tl.tensor, norm2: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Of two gains the larger one; a tie stays with the lower shape and the fewer small values."""
    second = (gain2 > gain) | ((gain2 == gain) & (number2 < number))
    return (
        tl.where(second, gain2, gain),
        tl.where(second, number2, number),
        tl.where(second, dot2, dot),
        tl.where(second, norm2, norm),
    )


@kernel
def _size(bits: tl.tensor) -> tl.tensor:
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
