"""What limits a fold on this machine: the bytes that it must move, alone, and its arithmetic, alone.

Bytes: every array of the state is read once and written once past the caches, and every payload is read.
Arithmetic: the fold's own parts, whose result goes to rows that stay in the cache. No fold of this form is faster
than the slower of the two, and one that overlaps nothing takes their sum.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from atoll.node.learning.compress.folding import PayloadArrays, _arrays_of
from atoll.node.learning.compress.reading import sparse_shape
from atoll.node.learning.compress.selecting import units_of
from atoll.node.learning.compress.sparse_fold import _GROUP, _values, read_group, sparse_scratch
from atoll.node.learning.compress.summing import add_row, clipped, finish_chunk, least_weight
from atoll.node.learning.kernels.compiled import Ints32, compiled, fence, inlined, stream
from atoll.node.learning.outer.rules.landing import BLOCK, PLAIN, Landing, _land_ball, _land_stale
from atoll.protocols.run.arena import CHUNK
from atoll.protocols.run.payload import SCALE_MASK, SHAPE_SHIFT, Layout

_STALE = 3
"""Kind of `co2`."""


class Limits:
    """The two limits of folds of these payloads, for states of one, two and three arrays."""

    def __init__(
        self, payloads: list[bytes], layout: Layout, landings: dict[str, Landing], state: Tensor, out: Tensor
    ) -> None:
        """`landings`: by name of a fold; the plain fold is added. `state` and `out` have all arrays of the largest
        state; `out` is overwritten."""
        rows = [None] * len(payloads)
        self._arrays: PayloadArrays = _arrays_of([64] * len(payloads), payloads, rows, layout)
        self._layout = layout
        self._landings = {"fold": PLAIN} | landings
        self._out, self._state = out.numpy(), state.numpy()

    def ways(self) -> dict[str, Callable[[], object]]:
        """What is measured, each beside memcpy; and streams of memory alone, of one array."""
        found: dict[str, Callable[[], object]] = {
            "memory read": partial(read_all, self._state[: self._layout.chunks]),
            "memory written": partial(write_all, self._out[: self._layout.chunks], 1),
            "memory written past the caches": partial(
                move_all, self._out, self._state[:1], self._layout.chunks, 1, self._arrays.bytes_PB[:0]
            ),
        }
        for name, landing in self._landings.items():
            found[f"{name}: bytes"] = partial(
                move_all, self._out, self._state, self._layout.chunks, 1 + _momenta(landing), self._arrays.bytes_PB
            )
            found[f"{name}: arithmetic"] = partial(self._compute, landing)
        return found

    def _compute(self, landing: Landing) -> None:
        scratch = sparse_scratch(self._layout, len(self._arrays.weight_PA))
        fault = compute_all(
            self._arrays, self._layout.chunks, sparse_shape(self._layout), landing.own(), self._state, scratch
        )
        assert not fault, fault


def _momenta(landing: Landing) -> int:
    return 0 if not landing.kind else 1 + int(landing.kind == _STALE)


@compiled
def read_all(values: Ints32) -> int:
    """Read rows; a figure that depends on all of them."""
    total = np.int64(0)
    for c in range(len(values)):
        row = values[c]
        for i in range(CHUNK):
            total += row[i]
    return int(total)


@compiled
def write_all(values: Ints32, value: int) -> None:
    """Write rows with ordinary stores, which first fetch what they overwrite."""
    for c in range(len(values)):
        row = values[c]
        for i in range(CHUNK):
            row[i] = value


@compiled
def move_all(out: Ints32, state: Ints32, chunks: int, arrays: int, bytes_PB: Any) -> int:
    """Move the rows of all arrays as a fold does, chunk by chunk, and read a share of all payloads for each.

    Of a state of one row that row is written to all: writing alone.
    """
    total, share = np.int64(0), bytes_PB.shape[1] // chunks
    for c in range(chunks):
        for p in range(len(bytes_PB)):
            part = bytes_PB[p, c * share : (c + 1) * share]
            for i in range(share):
                total += part[i]
        for a in range(arrays):
            row = c + a * chunks
            stream(out, row, 0, state[row if len(state) > 1 else 0], CHUNK)
    fence()
    return int(total)


@inlined
def _land(landing: Any, state: Any, moves: Ints32) -> bool:
    """The step of a block, as `landing.land` takes it where values are small."""
    if landing.kind == _STALE:
        fits = _land_stale(landing.after, state[0], state[1], state[2], moves, landing.numbers)
    else:
        alpha, beta = landing.numbers[0], landing.numbers[1]
        fits = _land_ball(landing.after, state[0], state[1], moves, alpha, beta, True)
    return bool(fits)


@compiled
def compute_all(payloads: Any, chunks: int, shape: Any, landing: Any, state: Any, scratch: Any) -> int:
    """As `sparse_fold.fold_sparse` of payloads that have all chunks, onto the same rows for each."""
    there, place, low, code, word, value, sums, wide, touched, total, moves = scratch
    weights, after, fits = payloads.weight_PA, landing.after, True
    for c in range(chunks):
        count, weight, members = np.uint64(0), 0, len(weights)
        for p in range(members):
            there[0, p], there[1, p] = p, c
        for first in range(0, members, _GROUP):
            group = min(_GROUP, members - first)
            fault = read_group(payloads, first, group, there, shape, word, place, low, code)
            if fault:
                return fault
            for g in range(group):
                p = first + g
                unit, own_weight = clipped(units_of(word[g] & SCALE_MASK), payloads, p, c), weights[p, 0]
                if unit and own_weight:
                    weight += own_weight
                    _values(value, word[g] >> SHAPE_SHIFT, unit * own_weight, own_weight, shape.code_bits)
                    count = add_row(sums, touched, count, low[g], code[g], value, shape.k)
        rule = 256, least_weight(payloads, c, there, members, 64)
        finish_chunk(sums, wide, touched, total, moves, (count, False), rule)
        if landing.kind == 0:
            theta, row = state[0], after[0]
            for start in range(0, CHUNK, BLOCK):
                for i in range(BLOCK):
                    row[i] = theta[start + i] + moves[start + i]
        else:
            for start in range(0, CHUNK, BLOCK):
                fits &= _land(landing, state[:, start : start + BLOCK], moves[start : start + BLOCK])
        moves[:] = 0
    return 0 if fits else -1
