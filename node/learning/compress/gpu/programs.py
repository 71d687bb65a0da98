"""Triton: the two kernels of an encoding. One program takes one chunk from its weights to its bytes.

12 bytes are read and 4 written of each value, once; all else stays in the cache.
"""

import triton.language as tl

from atoll.node.learning.compress.gpu.choosing import (
    add_up,
    bar_of,
    bars,
    few_of,
    magnitudes,
    store_candidates,
)
from atoll.node.learning.compress.gpu.packing import send
from atoll.node.learning.kernels.on_gpu import kernel, kernel_for_any


@kernel_for_any("at", "chunks", "words", "lows", "highs", "codes", anywhere=("payload",))
def encode_chunks(
    anchor: tl.tensor, local: tl.tensor, residual: tl.tensor, out: tl.tensor, payload: tl.tensor,
    scratch: tl.tensor, held: tl.tensor, faults: tl.tensor, beta: tl.tensor,
    at: tl.tensor, chunks: tl.tensor, words: tl.tensor, lows: tl.tensor, highs: tl.tensor, codes: tl.tensor,
    k: tl.constexpr, low_bits: tl.constexpr, high_bits: tl.constexpr, most: tl.constexpr, padded: tl.constexpr,
    enough: tl.constexpr, group: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
) -> None:  # fmt: skip
    """A chunk: what is sent into chunk `at + program` of the payload, the rest into `out`; not where ties abound.

    Of such a one `held` is 1, and `out` has its a. `words` … `codes`: where the payload's sections begin.
    `scratch`: `[programs, 3, most]` of int32. `rows` × `columns` is a chunk.
    """
    place = scratch + tl.cast(tl.program_id(0), tl.int64) * 3 * most
    # The columns are read before sizes by rank lie in their place.
    value, order = (place + most).to(tl.pointer_type(tl.float32)), place + 2 * most
    c = tl.program_id(0)
    start = tl.cast(c, tl.int64) * (rows * columns)
    best, top = add_up(anchor + start, local + start, residual + start, out + start, faults, beta, rows, columns)
    tied = top * 0
    if top >= 0:
        low = bar_of(best, top, k, enough)
        # `out` of other threads is read
        tl.debug_barrier()
        number = few_of(out + start, best, low, order, place, value, most, rows, columns)
        if number <= most:
            _send(place, value, order, number, top, out + start, payload, at + c, words, lows, highs, codes,
                  k, low_bits, high_bits, most, group, padded)  # fmt: skip
        else:
            tied += 1
    tl.store(held + c, tied)


@kernel_for_any("at", "chunks", "words", "lows", "highs", "codes", anywhere=("payload",))
def encode_tied(
    out: tl.tensor, payload: tl.tensor, scratch: tl.tensor, held: tl.tensor,
    at: tl.tensor, chunks: tl.tensor, words: tl.tensor, lows: tl.tensor, highs: tl.tensor, codes: tl.tensor,
    k: tl.constexpr, low_bits: tl.constexpr, high_bits: tl.constexpr, most: tl.constexpr, padded: tl.constexpr,
    group: tl.constexpr, size: tl.constexpr,
) -> None:  # fmt: skip
    """The chunks that `encode_chunks` left: `held` is 1 of them."""
    place = scratch + tl.cast(tl.program_id(0), tl.int64) * 3 * most
    value, order = (place + most).to(tl.pointer_type(tl.float32)), place + 2 * most
    for c in range(tl.program_id(0), chunks, tl.num_programs(0)):
        if tl.load(held + c) == 1:
            mine = out + tl.cast(c, tl.int64) * size
            i = tl.arange(0, size)
            a = tl.load(mine + i)
            bits = magnitudes(a)
            top = tl.max(bits, 0)
            low, high, found, over = bars(bits, top, k, most, size)
            store_candidates(a, i, low, high, most - over, place, value)
            _send(place, value, order, tl.minimum(found, most), top, mine, payload, at + c,
                  words, lows, highs, codes, k, low_bits, high_bits, most, group, padded)  # fmt: skip
            tl.debug_barrier()


@kernel
def _send(
    place: tl.tensor, value: tl.tensor, order: tl.tensor, number: tl.tensor, top: tl.tensor, out: tl.tensor,
    payload: tl.tensor, c: tl.tensor, words: tl.tensor, lows: tl.tensor, highs: tl.tensor, codes: tl.tensor,
    k: tl.constexpr, low_bits: tl.constexpr, high_bits: tl.constexpr, most: tl.constexpr, group: tl.constexpr,
    padded: tl.constexpr,
) -> None:  # fmt: skip
    """`send` of chunk c of the payload."""
    row = tl.cast(c, tl.int64)
    send(
        place, value, order, number, top, out,
        payload + tl.cast(words, tl.int64) + row * 2,
        payload + tl.cast(lows, tl.int64) + row * ((k * low_bits + 7) // 8),
        payload + tl.cast(highs, tl.int64) + row * ((high_bits + 7) // 8),
        payload + tl.cast(codes, tl.int64) + row * ((2 * k + 7) // 8),
        k, low_bits, high_bits, most, group, padded,
    )  # fmt: skip
