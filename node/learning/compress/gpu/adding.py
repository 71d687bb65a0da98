"""Triton: the sums of one chunk over all payloads, and the outer step that they make, in exact integers.

A program has a row of sums of its own, int64 Σ weight·q and int32 weight of the senders, takes one chunk after the
other, and leaves the row zero: so few rows are needed that they stay in the cache, and everything is one launch.
Bounds of all sums: `atoll.node.learning.outer.mean`. Integers have no order, so the bits are the CPU's.
"""

import triton.language as tl

from atoll.node.learning.compress.gpu.reading import read_chunk
from atoll.node.learning.kernels.on_gpu import kernel

LEFT_RANGE = 7
"""Bit of the faults beside those of payloads: θ + U does not fit."""
_LEFT_RANGE: tl.constexpr = tl.constexpr(1 << LEFT_RANGE)
_SEM: tl.constexpr = tl.constexpr("relaxed")
"""Order of memory for atomics: a program reads its own sums, behind a barrier, and the host reads the faults."""
_BLOCK: tl.constexpr = tl.constexpr(1024)
"""Places that a program divides at once."""


@kernel
def fold(
    payloads: tl.tensor, stride: tl.tensor, offsets: tl.tensor, maps: tl.tensor, which: tl.tensor,
    weights: tl.tensor, least: tl.tensor, total: tl.tensor, share: tl.tensor, theta: tl.tensor, out: tl.tensor,
    faults: tl.tensor, members: tl.tensor, chunks: tl.tensor, alpha: tl.tensor,
    k: tl.constexpr, low_bits: tl.constexpr, high_bits: tl.constexpr, bits_size: tl.constexpr,
    lows: tl.constexpr, highs: tl.constexpr, codes: tl.constexpr, size: tl.constexpr, moves: tl.constexpr,
) -> None:  # fmt: skip
    """U of each chunk, or θ + U where it `moves`, into `out`; `faults` gets bit n for fault n, bit 7 for range.

    `payloads` lie `stride` bytes apart, with sections at `offsets` `[members, 4]`. Row of chunk c in payload p:
    `maps[which[p], c]`, −1 for none. `least` `[chunks]` is the least divisor.
    """
    sums, shares = total + tl.program_id(0) * size, share + tl.program_id(0) * size
    c = tl.program_id(0)
    while c < chunks:
        p = c * 0
        while p < members:
            row = tl.load(maps + tl.load(which + p).to(tl.int64) * chunks + c).to(tl.int64)
            if row >= 0:
                at, start = payloads + p.to(tl.int64) * stride, offsets + p * 4
                place, q, wrong = read_chunk(
                    at + tl.load(start) + row * 2, at + tl.load(start + 1) + row * lows,
                    at + tl.load(start + 2) + row * highs, at + tl.load(start + 3) + row * codes,
                    k, low_bits, high_bits, bits_size, size,
                )  # fmt: skip
                if wrong != 0:
                    tl.atomic_or(faults, wrong, sem=_SEM)
                weight = tl.load(weights + p)
                tl.atomic_add(sums + place, q.to(tl.int64) * weight, mask=q != 0, sem=_SEM)
                tl.atomic_add(shares + place, weight, mask=q != 0, sem=_SEM)
            p += 1
        tl.debug_barrier()
        at, floor = c.to(tl.int64) * size, tl.load(least + c)
        for part in range(0, size, _BLOCK):
            _step(sums + part, shares + part, theta + at + part, out + at + part, faults, floor, alpha, moves)
        tl.debug_barrier()
        c += tl.num_programs(0)


@kernel
def _step(
    sums: tl.tensor, shares: tl.tensor, theta: tl.tensor, out: tl.tensor, faults: tl.tensor, least: tl.tensor,
    alpha: tl.tensor, moves: tl.constexpr,
) -> None:  # fmt: skip
    """−α·mean, halves away from zero, units of 2⁻²⁴; the sums are zero again."""
    i = tl.arange(0, _BLOCK)
    total = tl.load(sums + i)
    half = tl.maximum(tl.load(shares + i), least).to(tl.int64) << 10
    length = (tl.abs(total) * alpha * 2 + half) // (half * 2)
    moved = tl.where(total > 0, -length, length)
    if moves:
        moved += tl.load(theta + i).to(tl.int64)
        if tl.sum((moved != moved.to(tl.int32).to(tl.int64)).to(tl.int32), 0) > 0:
            tl.atomic_or(faults, _LEFT_RANGE, sem=_SEM)
    tl.store(out + i, moved.to(tl.int32))
    tl.debug_barrier()  # a sum may be read by another thread than the one that clears it
    tl.store(sums + i, tl.zeros((_BLOCK,), tl.int64))
    tl.store(shares + i, tl.zeros((_BLOCK,), tl.int32))
