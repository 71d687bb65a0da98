"""Triton: the k best of a chunk's candidates, their fit, the payload's bytes, and what is sent leaves e."""

import triton.language as tl

from atoll.node.learning.compress.gpu.choosing import magnitudes
from atoll.node.learning.compress.gpu.fitting import fit, high_level, units_of
from atoll.node.learning.kernels.on_gpu import kernel
from atoll.protocols.run.payload import LOW_LEVEL, SHAPE_SHIFT, VALUE_BITS

_LOW: tl.constexpr = tl.constexpr(LOW_LEVEL)
_SHAPE_SHIFT: tl.constexpr = tl.constexpr(SHAPE_SHIFT)
_UNIT: tl.constexpr = tl.constexpr(2.0**-VALUE_BITS)
_WORDS: tl.constexpr = tl.constexpr(8)
"""Words of 32 bits that are made at once."""


@kernel
def send(
    place: tl.tensor, value: tl.tensor, order: tl.tensor, number: tl.tensor, top: tl.tensor, out: tl.tensor,
    words: tl.tensor, lows: tl.tensor, highs: tl.tensor, codes: tl.tensor,
    k: tl.constexpr, low_bits: tl.constexpr, high_bits: tl.constexpr, most: tl.constexpr, group: tl.constexpr,
    padded: tl.constexpr,
) -> None:  # fmt: skip
    """A chunk's bytes, at `words`, `lows`, `highs` and `codes`, of `number` candidates; what is sent leaves `out`.

    `order`: `[k]` to work in. A chunk of scale 0 sends nothing: its places become 0 … k − 1.
    """
    # What other threads of this program stored before is read here.
    tl.debug_barrier()
    i = tl.arange(0, most)
    a = tl.load(value + i, mask=i < number, other=0.0, cache_modifier=".cg")
    at = tl.load(place + i, mask=i < number, other=0, cache_modifier=".cg")
    mine = magnitudes(a)
    before = _before(value, mine, number, most, group)
    best = (i < number) & (before < k)
    tl.store(order + (k - 1 - before), mine, mask=best)
    tl.debug_barrier()
    half, shape, edge = fit(order, number, top, k, padded)
    live = best & (before * 0 + half != 0)
    large = live & (mine > edge)
    negative = live & (a.to(tl.int32, bitcast=True) < 0)
    # level·units is a whole number that a float32 holds exactly, as on the host
    step = (units_of(half) * tl.where(large, high_level(shape), _LOW)).to(tl.float32) * _UNIT
    tl.store(out + at, tl.where(negative, a + step, a - step), mask=live)
    any_large = (half != 0) & (top > edge)
    word = tl.where(any_large, half | (shape << _SHAPE_SHIFT), half)
    tl.store(words, word.to(tl.uint8))
    tl.store(words + 1, (word >> 8).to(tl.uint8))
    slot = tl.cumsum(best.to(tl.int32), 0) - 1
    at = tl.where(live, at, slot)
    _deposit(lows, tl.where(best, at & ((1 << low_bits) - 1), 0), slot * low_bits, k * low_bits)
    _deposit(highs, best.to(tl.int32), (at >> low_bits) + slot, high_bits)
    _deposit(codes, large.to(tl.int32) | (negative.to(tl.int32) << 1), slot * 2, 2 * k)


@kernel
def _before(
    value: tl.tensor, mine: tl.tensor, number: tl.tensor, most: tl.constexpr, group: tl.constexpr
) -> tl.tensor:
    """How many of the candidates go before each of `mine`: larger ones, and equal ones of a lower place."""
    i = tl.arange(0, most)
    before = tl.zeros((most, group), tl.int32)
    for start in range(0, number, group):
        before += (_some(value, start, number, group)[None, :] > mine[:, None]).to(tl.int32)
    ranks = tl.sum(before, 1)
    # Where no two are equal the ranks are 0 … number − 1. Equal ones share the lowest of theirs: the sum is less.
    if tl.sum(tl.where(i < number, ranks, 0), 0) != number * (number - 1) // 2:
        same = tl.zeros((most, group), tl.int32)
        for start in range(0, number, group):
            first = (start + tl.arange(0, group))[None, :] < i[:, None]
            same += (first & (_some(value, start, number, group)[None, :] == mine[:, None])).to(tl.int32)
        ranks += tl.sum(same, 1)
    return ranks


@kernel
def _some(value: tl.tensor, start: tl.tensor, number: tl.tensor, group: tl.constexpr) -> tl.tensor:
    """Magnitudes of `group` candidates; -1 behind the last."""
    j = start + tl.arange(0, group)
    bits = magnitudes(tl.load(value + j, mask=j < number, other=0.0, cache_modifier=".cg"))
    return tl.where(j < number, bits, -1)


@kernel
def _deposit(out: tl.tensor, field: tl.tensor, bit: tl.tensor, bits: tl.constexpr) -> None:
    """The bytes of `bits` bits: fields of at most 12 bits, each from a bit of its own on; none share a bit."""
    for first in range(0, bits, 32 * _WORDS):
        shift = bit[:, None] - (first + 32 * tl.arange(0, _WORDS)[None, :])
        # Only shifts of 0 … 31 have a meaning.
        left = field[:, None] << tl.minimum(tl.maximum(shift, 0), 31)
        right = field[:, None] >> tl.minimum(tl.maximum(-shift, 0), 31)
        # A field that begins before a word ends in it, or not even that: then nothing is left of it.
        word = tl.sum(tl.where(shift < 0, right, tl.where(shift < 32, left, 0)), 0)
        b = tl.arange(0, 4)[None, :]
        at = first // 8 + tl.arange(0, _WORDS)[:, None] * 4 + b
        tl.store(out + at, (word[:, None] >> (8 * b)).to(tl.uint8), mask=at < (bits + 7) // 8)
