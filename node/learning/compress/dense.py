"""Compiled: the dense codecs `int8` and `e3m0`; every value is a level times the scale of its block.

int8 takes the largest scale at which the block's largest value still reaches level 127. e3m0 has the levels 0, 1,
2, 4 … 64: it tries four scales within the octave at which the largest value is level 64, and takes the best.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from atoll.node.learning.compress.blocks import add_up, chunks_in, clear_padding, part_of, row_of
from atoll.node.learning.compress.selecting import half_bits, units_of
from atoll.node.learning.compress.summing import clipped, find_members, least_weight
from atoll.node.learning.kernels.compiled import Bytes, Floats, Ints, Ints32, compiled, inlined
from atoll.protocols.run.arena import CHUNK
from atoll.protocols.run.payload import DENSE_BLOCK, MOST_SCALE, TOP_LEVEL, VALUE_BITS, Layout

FAULTS = {
    20: "a scale beyond its range",
    21: "a code that nobody writes",
    22: "a block of scale 0 with values",
    23: "a block without its largest level",
}
LEFT_RANGE = 24
_UNIT = np.float32(2.0**-VALUE_BITS)
_UNITS = np.float32(2.0**VALUE_BITS)
_NOT_FINITE = np.int32(0x7F800000)
_LEAST_OF_TOP = np.float32(48)
"""Of e3m0: from here on a value is nearer to level 64 than to 32, in units of its scale."""
_TRIES = np.array([1 / 48, 1 / 48 * 2**-0.25, 1 / 48 * 2**-0.5, 1 / 48 * 2**-0.75])


class DenseShape(NamedTuple):
    """What the kernels know of a dense codec and of the layout of a payload that is written."""

    block: int
    code_bits: int
    top: int
    """The largest level that a code can name."""
    max_scale: int
    """Bits of the largest fp16 scale."""
    scale_bytes: int
    """Bytes of a chunk's row of scales; `code_bytes` likewise."""
    code_bytes: int
    scales_at: int
    codes_at: int


def dense_shape(layout: Layout) -> DenseShape:
    """The shape of a layout of `int8` or `e3m0`."""
    block, top, max_scale = (table[layout.codec] for table in (DENSE_BLOCK, TOP_LEVEL, MOST_SCALE))
    return DenseShape(block, layout.code_bits, top, max_scale, *layout.row_bytes, *layout.offsets)


def dense_scratch(block: int) -> tuple[npt.NDArray[Any], ...]:
    """Levels and sums of a chunk, weights of its blocks, one float: what the kernels work in, for each thread."""
    return (
        np.zeros(CHUNK, np.int32),
        np.zeros(CHUNK, np.int64),
        np.zeros(CHUNK // block, np.int64),
        np.zeros(1, np.float32),
    )


@compiled
def encode_dense(
    anchor: Any,
    local: Any,
    in_place: bool,
    residual: Any,
    beta: Any,
    first: int,
    out: Bytes,
    shape: Any,
    scratch: Any,
) -> bool:
    """Encode β·e + (anchor − local) as chunks `first …` of `out`; e becomes the rest. False if a is not finite.

    `in_place`: the anchor becomes the local weights, and padding of e zero.
    """
    block, width, top, most = shape.block, shape.code_bits, shape.top, shape.max_scale
    scales, codes = shape.scale_bytes, shape.code_bytes
    level, _, _, single = scratch
    part = 0
    for at_chunk in range(chunks_in(local)):
        c, part = first + at_chunk, part_of(local, part, at_chunk)
        row = row_of(local[part], at_chunk)
        e = residual[row]
        add_up(e, anchor[row], local[part], at_chunk, beta, in_place)
        for b in range(CHUNK // block):
            values, levels = e[b * block : (b + 1) * block], level[b * block : (b + 1) * block]
            # Bits of |x| rise with |x|, so the largest value, infinity and NaN are found by integer comparisons.
            largest = np.int32(0)
            bits = values.view(np.int32)
            for i in range(block):
                largest = max(largest, bits[i] & np.int32(0x7FFFFFFF))
            if largest >= _NOT_FINITE:
                return False
            # the largest magnitude as a float again, without a second pass
            single.view(np.int32)[0] = largest
            size = np.float64(single[0]) * np.float64(_UNITS)
            half = _scale_of(values, levels, size, width, top, most, single)
            _levels(values, levels, units_of(half), width, top)
            step = np.float32(units_of(half)) * _UNIT
            for i in range(block):
                values[i] -= np.float32(levels[i]) * step
            out[shape.scales_at + c * scales + 2 * b] = half & 255
            out[shape.scales_at + c * scales + 2 * b + 1] = half >> 8
        _write(out[shape.codes_at + c * codes : shape.codes_at + (c + 1) * codes], level, width)
        if in_place:
            clear_padding(local[part], at_chunk, e)
    return True


@inlined
def _scale_of(values: Floats, levels: Ints32, size: float, width: int, top: int, most: int, single: Floats) -> int:
    """Bits of the block's fp16 scale; `size` is the largest magnitude in units of 2⁻²⁶."""
    if width == 8:
        return _half_below(size / top, size / top, most, single)
    # float32 sums in the order of the block: which scale wins is part of the bytes, and a tie goes to the first.
    best, least = 0, np.inf
    for t in range(len(_TRIES)):
        half = _half_below(size * _TRIES[t], size / 48, most, single)
        # Levels follow from a float32 product, which may be rounded to just below 48 where `size` is just above:
        # the block would end at level 32, and every reader would refuse the payload.
        while half and np.float32(size * _UNIT) * _inverse(units_of(half)) < _LEAST_OF_TOP:
            half -= 1
        _levels(values, levels, units_of(half), width, top)
        step = np.float32(units_of(half)) * _UNIT
        error: Any = np.float32(0)
        for i in range(len(values)):
            rest = values[i] - np.float32(levels[i]) * step
            error += rest * rest
        if error < least:
            best, least = half, error
    return best


@inlined
def _half_below(units: float, limit: float, most: int, single: Floats) -> int:
    """Bits of the fp16 nearest to a scale in units of 2⁻²⁴, but not above `limit` units nor above `most`."""
    # Rounding to nearest may go up: above the limit the largest value would not reach the top level any more,
    # and a block without its top level is refused by every reader.
    half = min(half_bits(units * 2.0**-24, single), most)
    while half and units_of(half) > limit:
        half -= 1
    return half


@inlined
def _inverse(units: int) -> Any:
    """The float32 by which values of a block are multiplied; 0 for scale 0."""
    # Part of the bytes: one rounded reciprocal for the block. A division of each value could give other levels.
    return np.float32(0) if units == 0 else _UNITS / np.float32(units)


@inlined
def _levels(values: Floats, levels: Ints32, units: int, width: int, top: int) -> None:
    """Nearest levels of a block; 0 for a block of scale 0."""
    inverse = _inverse(units)
    most = np.float32(2 * top)
    if width == 8:
        for i in range(len(values)):
            size = min(abs(values[i]) * inverse, most)
            rank = min(np.int32(size + np.float32(0.5)), np.int32(top))
            levels[i] = -rank if values[i] < 0 else rank
    else:
        for i in range(len(values)):
            size = min(abs(values[i]) * inverse, most)
            # 2^⌊log₂(size / 1.5)⌋ + 1: the nearest power of two, halfway is upward
            power = 0 if size < np.float32(0.5) else (1 if size < np.float32(1.5) else 2)
            for double in (3.0, 6.0, 12.0, 24.0, 48.0):
                power = power * 2 if size >= np.float32(double) else power
            levels[i] = -power if values[i] < 0 else power


@inlined
def _write(row: Bytes, level: Ints32, width: int) -> None:
    if width == 8:
        for i in range(CHUNK):
            row[i] = np.uint8(level[i] & 255)
    else:
        for i in range(CHUNK // 2):
            row[i] = np.uint8(_nibble(level[2 * i]) | (_nibble(level[2 * i + 1]) << 4))


@inlined
def _nibble(level: int) -> int:
    """Bits 0-2: 0 for 0, else 1 + log₂ of the magnitude; bit 3: negative."""
    size = abs(level)
    rank = (size > 0) + (size > 1) + (size > 2) + (size > 4) + (size > 8) + (size > 16) + (size > 32)
    return rank | (8 if level < 0 else 0)


@compiled
def fold_dense(
    payloads: Any, span: tuple[int, int], shape: Any, step: tuple[int, int], theta: Any, out: Any, scratch: Any
) -> int:
    """θ + U of chunks `span` into `out`; 0, or a fault's number. With an empty `out` payloads are only checked.

    `payloads`: `folding.PayloadArrays`. `step`: α_256 and floor_256.
    """
    level, total, share, _, there = scratch
    rows, offsets = payloads.bytes_PB, payloads.offset_PS
    block, (alpha_256, floor_256) = shape.block, step
    for c in range(span[0], span[1]):
        members = find_members(c, payloads, there)
        for m in range(members):
            p, r = there[0, m], there[1, m]
            own_weight = payloads.weight_PA[p, payloads.atom_C[c]]
            fault = read_levels(rows[p], r, shape, offsets[p], level)
            if fault:
                return fault
            for b in range(CHUNK // block if len(out) else 0):
                spot = offsets[p, 0] + r * shape.scale_bytes + 2 * b
                whole = units_of(np.int64(rows[p, spot]) | (np.int64(rows[p, spot + 1]) << 8))
                unit = clipped(whole, payloads, p, c) * own_weight
                # A block of scale 0 was not sent: its member's weight does not count in the block's mean.
                share[b] += own_weight if unit else 0
                for i in range(b * block, (b + 1) * block):
                    total[i] += level[i] * unit
        if len(out):
            least = least_weight(payloads, c, there, members, floor_256)
            for b in range(CHUNK // block):
                _divide(total[b * block : (b + 1) * block], share[b], alpha_256, least)
                share[b] = 0
            if not _move(theta[c], out[c], total):
                return LEFT_RANGE
            total[:] = 0
    return 0


@inlined
def read_levels(row: Bytes, r: int, shape: Any, offsets: Ints, level: Ints32) -> int:
    """Levels of row `r` of a payload into `level`; 0, or the number of a fault."""
    block, width, codes = shape.block, shape.code_bits, shape.code_bytes
    code = row[offsets[1] + r * codes : offsets[1] + (r + 1) * codes]
    strange = False
    if width == 8:
        for i in range(CHUNK):
            level[i] = np.int8(code[i])
            # −128 has no counterpart above: nobody writes it, and two forms of one value would be two payloads
            strange |= level[i] == -128
    else:
        for i in range(CHUNK // 2):
            strange |= (code[i] & 15) == 8 or (code[i] >> 4) == 8
            level[2 * i] = _level_of(code[i] & 15)
            level[2 * i + 1] = _level_of(code[i] >> 4)
    if strange:
        return 21
    for b in range(CHUNK // block):
        spot = offsets[0] + r * shape.scale_bytes + 2 * b
        scale = np.int64(row[spot]) | (np.int64(row[spot + 1]) << 8)
        largest = np.int32(0)
        for i in range(b * block, (b + 1) * block):
            largest = max(largest, abs(level[i]))
        if scale > shape.max_scale:
            return 20
        if scale == 0 and largest:
            return 22
        if scale and largest != shape.top:
            return 23
    return 0


@inlined
def _level_of(nibble: Any) -> Any:
    size = np.int32((np.int32(1) << np.int32(nibble & 7)) >> np.int32(1))
    return -size if nibble & 8 else size


@inlined
def _divide(total: Ints, share: int, alpha: int, least: int) -> None:
    """As `summing.divide`, with one divisor for all."""
    # A product with the rounded inverse is also off by at most one, and the remainder corrects it.
    half = max(share, least) << 10
    bottom = half << 1
    inverse = 1.0 / np.float64(bottom)
    for i in range(len(total)):
        top = ((alpha * abs(total[i])) << 1) + half
        size = np.int64(np.float64(top) * inverse)
        rest = top - size * bottom
        size += np.int64(rest >= bottom) - np.int64(rest < 0)
        total[i] = -size if total[i] > 0 else size


@inlined
def _move(theta: Ints32, out: Ints32, moves: Ints) -> bool:
    """out ← θ + moves; False where a sum does not fit int32."""
    sound = True
    for i in range(CHUNK):
        after = np.int64(theta[i]) + moves[i]
        sound &= after == np.int64(np.int32(after))
        out[i] = np.int32(after)
    return bool(sound)


@compiled
def add_dense(payloads: Any, shape: Any, residual: Any, level: Ints32) -> int:
    """Add the values of one payload, which has all chunks, to `residual`; 0, or the number of a fault."""
    block, row, offsets = shape.block, payloads.bytes_PB[0], payloads.offset_PS[0]
    for c in range(len(residual)):
        fault = read_levels(row, c, shape, offsets, level)
        if fault:
            return fault
        for b in range(CHUNK // block):
            spot = offsets[0] + c * shape.scale_bytes + 2 * b
            step = np.float32(units_of(np.int64(row[spot]) | (np.int64(row[spot + 1]) << 8))) * _UNIT
            for i in range(b * block, (b + 1) * block):
                residual[c, i] += np.float32(level[i]) * step
    return 0
