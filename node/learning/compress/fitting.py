"""Compiled: the best scale, shape and split of one chunk's chosen values, exactly."""

from typing import Any

import numpy as np
import numpy.typing as npt

from atoll.node.learning.kernels.compiled import inlined
from atoll.protocols.run.payload import HIGH_LEVELS, LOW_LEVEL, ONE_FP16, SHAPE_SHIFT

Doubles = npt.NDArray[np.float64]

HIGHS = np.array(HIGH_LEVELS, np.int64)
SHAPES = len(HIGH_LEVELS)


def norms_of(k: int) -> Doubles:
    """`[shapes, k]`: Σ level² by shape and number of small values less one."""
    few = np.arange(1, k + 1, dtype=np.float64)
    return np.stack([LOW_LEVEL**2 * few + float(high) ** 2 * (k - few) for high in HIGH_LEVELS])


@inlined
def best_fit(small: Doubles, norms: Doubles, gain: Doubles) -> tuple[int, int, float]:
    """Shape, index of the largest small value, and scale of least error; `small` are cumulative sums of sizes.

    Gains are compared as integers, which is the same for values that are not negative, and vectorises.
    """
    k = len(small)
    total = small[k - 1]
    # Least squares: the error is Σv² − (Σlv)²/Σl², so the largest (Σlv)²/Σl² wins. Ties go to the lower shape and
    # then to the fewer small values, as in the plain version: both are part of the payload's bytes.
    most, shape = np.int64(-1), 0
    for s in range(SHAPES):
        row, norm, high = gain[s], norms[s], np.float64(HIGHS[s])
        for i in range(k):
            dot = LOW_LEVEL * small[i] + high * (total - small[i])
            row[i] = dot * dot / norm[i]
        largest = np.int64(-1)
        bits = row.view(np.int64)
        for i in range(k):
            largest = max(largest, bits[i])
        if largest > most:
            most, shape = largest, s
    split = 0
    bits = gain[shape].view(np.int64)
    while bits[split] != most:
        split += 1
    dot = LOW_LEVEL * small[split] + np.float64(HIGHS[shape]) * (total - small[split])
    return shape, split, 4.0 * dot / norms[shape, split]


@inlined
def half_bits(scale: float, single: npt.NDArray[np.float32]) -> int:
    """Bits of the fp16 nearest to a scale ≥ 0, halves to even, through float32 as torch does; at most 1.0."""
    if scale >= 1.0:
        return ONE_FP16
    single[0] = np.float32(scale)
    bits = int(single.view(np.uint32)[0])
    exponent = (bits >> 23) - 127
    # below half of the smallest subnormal, 2⁻²⁴
    if exponent < -25:
        return 0
    mantissa = (bits & 0x7FFFFF) | 0x800000
    # an fp16 keeps 11 bits of 24, and one less for each step below its smallest normal exponent, −14
    drop = 13 if exponent >= -14 else -1 - exponent
    kept = mantissa >> drop
    rest = mantissa & ((1 << drop) - 1)
    middle = 1 << (drop - 1)
    if rest > middle or (rest == middle and kept & 1):
        kept += 1
    # A carry out of the mantissa lands in the exponent, which is the next larger number: no case of its own.
    return kept + ((exponent + 14) << 10) if exponent >= -14 else kept


@inlined
def units_of(half: Any) -> Any:
    """An fp16 scale ≥ 0 in units of 2⁻²⁴, exactly: a whole number of at most 2²⁴ for scales up to 1."""
    exponent = half >> 10
    fraction = half & 0x3FF
    return (fraction + 1024) << (exponent - 1) if exponent else fraction


@inlined
def word_of(half: int, shape: int, any_large: bool) -> int:
    """The 16-bit word of a chunk: fp16 scale and shape, which is 0 where no value is large."""
    return half | (shape << SHAPE_SHIFT) if any_large else half
