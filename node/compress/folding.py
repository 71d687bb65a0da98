"""Compiled: R payloads -> U in one pass over the chunks, in exact integers; every rule of the wire is held.

The bits of `decode` and `aggregate.mean.outer_update`, whose docstring has the bounds of all sums. Only places
that somebody sent are divided: the quotient of two float64 is off by at most one, and the remainder, taken in
integers, says which way.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from atoll.node.compress.compiled import compiled, inlined
from atoll.node.compress.encoding import each_range, ranges_of
from atoll.node.compress.fitting import units_of
from atoll.protocols.arena import CHUNK
from atoll.protocols.errors import DecodeError, Divergence
from atoll.protocols.payload import HIGH_LEVELS, LOW_LEVEL, ONE_FP16, SCALE_MASK, SHAPE_SHIFT, Layout, check_frame
from atoll.protocols.records import MAX_SET, MAX_WEIGHT

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]

FAULTS = (
    "",
    "a scale above 1",
    "a chunk does not have k indices",
    "indices do not rise within the chunk",
    "a chunk without small values, or a shape that nothing uses",
    "a chunk of scale 0 is not in its one form",
    "padding bits are not zero",
)
_LEFT_RANGE = len(FAULTS)
_HIGHS = np.array(HIGH_LEVELS, np.int64)
_SET_BITS = np.array(
    [([bit for bit in range(8) if byte >> bit & 1] + [0] * 8)[:8] for byte in range(256)], np.int32
)
_BIT_COUNT = np.array([byte.bit_count() for byte in range(256)], np.uint64)
_FOUR_CODES = (
    np.array([[byte >> 2 * i & 3 for i in range(4)] for byte in range(256)], np.uint8).view(np.uint32)[:, 0].copy()
)


Member = tuple[int, bytes | memoryview]
"""Weight and payload."""


class Step(NamedTuple):
    """How a mean becomes an outer step; from the RunSpec."""

    alpha_256: int
    floor_256: int


def check(payload: bytes | memoryview, chunks: int, k: int) -> None:
    """Raise DecodeError unless these bytes are a legal payload."""
    layout = Layout(chunks, k)
    check_frame(payload, layout)
    rows = np.frombuffer(payload, np.uint8).reshape(1, -1)
    empty = np.empty((0, CHUNK), np.int32)
    _raise([_fold_chunks(rows, np.ones(1, np.int64), (0, chunks), _facts(layout), (0, 1), empty, empty, empty)])


def update_of(members: Sequence[Member], chunks: int, k: int, step: Step, *, threads: int = 1) -> Tensor:
    """U int32 `[chunks, 4096]`, units of 2⁻²⁴, of (weight, payload) of one round's set, each given once.

    Raises DecodeError for an illegal payload or weight and for more than 1024 members.
    """
    update = torch.empty((chunks, CHUNK), dtype=torch.int32)
    nothing = torch.empty((0, CHUNK), dtype=torch.int32)
    _run(members, Layout(chunks, k), step, threads, (update, nothing, nothing))
    return update


def fold_into(
    theta_C4096: Tensor,
    members: Sequence[Member],
    k: int,
    step: Step,
    out_C4096: Tensor,
    *,
    threads: int = 1,
) -> None:
    """θ + U into `out_C4096`, in the same pass and without storing U; both int32. Padding is left to the caller.

    Raises DecodeError and, where a weight leaves ±128, Divergence; θ is never changed.
    """
    nothing = torch.empty((0, CHUNK), dtype=torch.int32)
    _run(members, Layout(len(theta_C4096), k), step, threads, (nothing, theta_C4096, out_C4096))


def _run(
    members: Sequence[Member],
    layout: Layout,
    step: Step,
    threads: int,
    arrays: tuple[Tensor, ...],
) -> None:
    if len(members) > MAX_SET or not all(1 <= weight <= MAX_WEIGHT for weight, _ in members):
        raise DecodeError("a set with too many members, or with an illegal weight")
    rows = np.empty((len(members), layout.size_bytes), np.uint8)
    for row, (_, payload) in zip(rows, members, strict=True):
        check_frame(payload, layout)
        row[:] = np.frombuffer(payload, np.uint8)
    weights = np.array([weight for weight, _ in members], np.int64)
    least = max(1, -(-step.floor_256 * int(weights.sum()) // 256))
    given = [each.numpy() for each in arrays]
    facts, rule = _facts(layout), (step.alpha_256, least)

    def work(start: int, stop: int) -> int:
        return _fold_chunks(rows, weights, (start, stop), facts, rule, *given)

    _raise(each_range(ranges_of(layout.chunks, threads), work))


def _raise(faults: list[int]) -> None:
    worst = max(faults, default=0)
    if worst == _LEFT_RANGE:
        raise Divergence("a weight left its range of -128 … 128")
    if worst:
        raise DecodeError(f"payload: {FAULTS[worst]}")


def _facts(layout: Layout) -> tuple[int, ...]:
    return (layout.k, layout.low_bits, layout.high_bits, *layout.row_bytes[1:], *layout.offsets)


@compiled
def _fold_chunks(
    rows: Bytes,
    weights: Ints,
    span: tuple[int, int],
    facts: Any,
    step: tuple[int, int],
    update: Any,
    theta: Any,
    view: Any,
) -> int:
    """Number of a fault, 0 for none. Fills the chunks of `update` and `view` unless these are empty."""
    wanted = len(update) > 0 or len(view) > 0
    total, share = np.empty(CHUNK + 8, np.int64), np.empty(CHUNK + 8, np.int64)
    k, low_bits, high_bits, lows, highs, codes, at_words, at_lows, at_highs, at_codes = facts
    place = np.empty(8 * highs + 16, np.int32)
    code = np.empty(4 * codes + 4, np.uint8)
    low = np.zeros(k + 4, np.int32)
    sums = np.zeros(2 * CHUNK, np.int64)
    touched = np.empty(CHUNK + 1, np.int32)
    value = np.empty(4, np.int64)
    for c in range(span[0], span[1]):
        count = np.uint64(0)
        for p in range(len(rows)):
            row = rows[p]
            word = int(row[at_words + 2 * c]) | (int(row[at_words + 2 * c + 1]) << 8)
            low_row = row[at_lows + c * lows : at_lows + (c + 1) * lows]
            high_row = row[at_highs + c * highs : at_highs + (c + 1) * highs]
            code_row = row[at_codes + c * codes : at_codes + (c + 1) * codes]
            fault = _places(low_row, high_row, low, place, k, low_bits, high_bits)
            if fault == 0:
                fault = _codes(code_row, code, place, k, word)
            if fault:
                return fault
            scale = word & SCALE_MASK
            if scale and wanted:
                _values(value, units_of(scale) * weights[p], _HIGHS[word >> SHAPE_SHIFT])
                count = _add(sums, touched, count, place, code, value, weights[p], k)
        if wanted:
            found = int(count)
            _divide(sums, touched, found, step, total, share)
            if len(update):
                row_out = update[c]
                row_out[:] = 0
                for t in range(found):
                    row_out[np.uint32(touched[t])] = total[t]
            if len(view) and not _move(theta[c], view[c], touched, total, found):
                return _LEFT_RANGE
    return 0


@inlined
def _places(
    low_row: Bytes, high_row: Bytes, low: Ints32, place: Ints32, k: int, low_bits: int, high_bits: int
) -> int:
    """Indices of a chunk into `place`; the number of a fault."""
    _lows(low_row, low, k, low_bits)
    if (k * low_bits) & 7 and low_row[-1] >> ((k * low_bits) & 7):
        return 6
    if high_bits & 7 and high_row[-1] >> (high_bits & 7):
        return 6
    found = np.uint64(0)
    for b in range(len(high_row)):
        byte = np.uint32(high_row[b])
        start = np.int32(8 * b)
        for t in range(8):
            place[found + np.uint64(t)] = start + _SET_BITS[byte, t]
        found += _BIT_COUNT[byte]
    if found != k:
        return 2
    for i in range(k):
        place[i] = ((place[i] - np.int32(i)) << low_bits) | low[i]
    rises = np.int32(1)
    for i in range(1, k):
        rises &= np.int32(place[i] > place[i - 1])
    return 0 if rises and place[k - 1] < CHUNK else 3


@inlined
def _lows(row: Bytes, low: Ints32, k: int, low_bits: int) -> None:
    if low_bits == 6 and k % 4 == 0:
        for g in range(k // 4):
            three = np.int32(row[3 * g]) | (np.int32(row[3 * g + 1]) << 8) | (np.int32(row[3 * g + 2]) << 16)
            low[4 * g] = three & 63
            low[4 * g + 1] = (three >> 6) & 63
            low[4 * g + 2] = (three >> 12) & 63
            low[4 * g + 3] = three >> 18
        return
    held, have, at = 0, 0, 0
    for i in range(k):
        while have < low_bits:
            held |= int(row[at]) << have
            at, have = at + 1, have + 8
        low[i] = held & ((1 << low_bits) - 1)
        held, have = held >> low_bits, have - low_bits


@inlined
def _codes(row: Bytes, code: Bytes, place: Ints32, k: int, word: int) -> int:
    """Codes of a chunk into `code`; the number of a fault."""
    large, used = np.uint64(0), np.uint8(0)
    fours = code.view(np.uint32)
    for g in range(len(row)):
        byte = np.uint32(row[g])
        used |= row[g]
        fours[g] = _FOUR_CODES[byte]
        large += _BIT_COUNT[byte & np.uint32(0x55)]
    if k & 3 and row[-1] >> (2 * (k & 3)):
        return 6
    scale = word & SCALE_MASK
    if scale > ONE_FP16:
        return 1
    if large == k or (large == 0 and word >> SHAPE_SHIFT):
        return 4
    # k rising places of which the last is k − 1 are 0 … k − 1
    if scale == 0 and (used or place[k - 1] != k - 1):
        return 5
    return 0


@inlined
def _values(value: Ints, unit: int, high: int) -> None:
    value[0] = unit * LOW_LEVEL
    value[1] = unit * high
    value[2] = -value[0]
    value[3] = -value[1]


@inlined
def _add(
    sums: Ints, touched: Ints32, count: Any, place: Ints32, code: Bytes, value: Ints, weight: int, k: int
) -> Any:
    """Add one chunk of one payload; the number of places that anybody sent."""
    for i in range(k):
        at = np.uint32(place[i])
        spot = np.uint32(at + at)
        sent = sums[spot + np.uint32(1)]
        touched[count] = place[i]
        count += np.uint64(sent == 0)
        sums[spot] += value[np.uint32(code[i])]
        sums[spot + np.uint32(1)] = sent + weight
    return count


@inlined
def _divide(sums: Ints, touched: Ints32, count: int, step: tuple[int, int], total: Ints, share: Ints) -> None:
    """The outer steps of the touched places into `total`; clears the sums."""
    alpha, least = np.int64(step[0]), np.int64(step[1])
    for t in range(count):
        spot = np.uint32(touched[t]) * np.uint32(2)
        total[t] = sums[spot]
        share[t] = sums[spot + np.uint32(1)]
        sums[spot] = 0
        sums[spot + np.uint32(1)] = 0
    for t in range(count):
        half = max(share[t], least) << 10
        bottom = half << 1
        top = ((alpha * abs(total[t])) << 1) + half
        size = np.int64(np.float64(top) / np.float64(bottom))
        rest = top - size * bottom
        size += np.int64(rest >= bottom) - np.int64(rest < 0)
        total[t] = -size if total[t] > 0 else size


@inlined
def _move(theta: Ints32, view: Ints32, touched: Ints32, moves: Ints, count: int) -> bool:
    """θ + U of one chunk into `view`; False where a weight leaves its range."""
    for i in range(CHUNK):
        view[i] = theta[i]
    sound = True
    for t in range(count):
        at = np.uint32(touched[t])
        after = np.int64(theta[at]) + moves[t]
        sound &= after == np.int64(np.int32(after))
        view[at] = np.int32(after)
    return bool(sound)
