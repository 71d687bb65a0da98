"""What a rule is told about the contributions of a round, in exact integers: norms by atom, and inner products.

A rule (`node/learning/outer/aggregation.py`) judges contributions and never sees a value. Norms need the words and
codes of a payload only: a count of its large values says all. Inner products need the places, so they are taken of
a sample of the chunks, which costs about as much as adding the payloads.

Bounds: a unit is at most 2²⁴ (2²⁵ where a payload is not legal, which the fold refuses), so its square is kept in
two halves, and an atom of 2¹⁸ chunks has sums below 2⁶³. For inner products all values are shifted until
no norm exceeds 2⁶⁰: by Cauchy and Schwarz no partial sum then does.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from atoll.node.learning.compress import dense, lookup
from atoll.node.learning.compress.reading import sparse_shape
from atoll.node.learning.compress.selecting import units_of
from atoll.node.learning.compress.sparse_fold import HIGHS, read_group, sparse_scratch
from atoll.node.learning.compress.summing import CLIP_BITS, clipped, find_members
from atoll.node.learning.kernels.compiled import Ints, Ints32, compiled, each_range
from atoll.protocols.run.arena import CHUNK
from atoll.protocols.run.payload import LOW_LEVEL, SCALE_MASK, SHAPE_SHIFT, Layout

WHOLE = 1 << CLIP_BITS
"""What is left of a payload that no rule clips."""
_HALF_BITS = 24
_HALF_MASK = (1 << _HALF_BITS) - 1
_PRODUCT_BITS = 60
_LARGE_CODES = np.array([(byte & 0x55).bit_count() for byte in range(256)], np.int64)


class Judge(Protocol):
    """What a rule makes of a round's contributions, from these figures alone. Payloads have the caller's order."""

    atom_C: Ints32
    """Number of the atom that each chunk of the round belongs to, from 0 on."""
    compares: bool
    """Whether `weights` is asked: it needs inner products."""

    def clip(self, atom: int, weight_P: Sequence[int], norm2_P: Sequence[int]) -> Sequence[int]:
        """What is left of each payload in an atom, 0 … WHOLE, of squared norms there in units of 2⁻⁵²."""

    def weigh(self, atom: int, weight_P: Sequence[int], norm2_P: Sequence[int]) -> Sequence[int]:
        """Weights in an atom, 0 … 255, of the given ones and of squared norms there, as `clip` has them."""

    def sample(self, members: int, k: int) -> Ints:
        """Numbers of the chunks that inner products are taken of; int64, rising."""

    def weights(self, weight_P: Ints, gram_PP: Ints) -> Ints:
        """int64 `[P]`, 0 … 255: the weights to fold with, of the given ones and of all inner products."""


class _Sampled(NamedTuple):
    """What a thread that takes inner products works in."""

    place_MK: npt.NDArray[np.uint32]
    value_MK: Ints
    row: Ints


def judged(arrays: Any, layout: Layout, judge: Judge, threads: int) -> Any:
    """The same `folding.PayloadArrays` with what the rule leaves of each payload.

    Raises nothing for an illegal payload: the fold that follows reads each of them whole, and refuses it there.
    """
    if not len(arrays.weight_PA):
        return arrays
    given_P = arrays.weight_PA[:, 0]
    # A copy, because a read-only array is another type to the compiler, and each type is compiled by itself.
    arrays = arrays._replace(atom_C=judge.atom_C.copy())
    clip_PA, weight_PA, left = _by_atom(_halves(arrays, layout, threads), given_P.tolist(), judge)
    arrays = arrays._replace(clip_PA=clip_PA, weight_PA=weight_PA)
    if judge.compares:
        weight_P = judge.weights(given_P, _gram(arrays, layout, left, judge, threads))
        arrays = arrays._replace(weight_PA=np.repeat(weight_P[:, None], clip_PA.shape[1], axis=1))
    return arrays


def _halves(arrays: Any, layout: Layout, threads: int) -> Ints:
    """int64 `[P, A, 2]`: squared norms, the sums of the high and the low halves of units' squares."""
    members = len(arrays.weight_PA)
    shape = members, int(arrays.atom_C.max(initial=0)) + 1, 2

    def work(start: int, stop: int) -> Ints:
        halves, there = np.zeros(shape, np.int64), np.empty((2, members), np.int64)
        if layout.is_dense:
            level = np.empty(CHUNK, np.int32)
            measure_dense(arrays, (start, stop), dense.dense_shape(layout), level, halves, there)
        elif layout.has_table:
            scratch = sparse_scratch(layout, members)
            lookup.measure_lookup(arrays, (start, stop), sparse_shape(layout), scratch, halves, _HALF_BITS)
        else:
            measure_sparse(arrays, (start, stop), sparse_shape(layout), halves, there)
        return halves

    total = np.zeros(shape, np.int64)
    for part in each_range(layout.chunks, threads, work):
        total += part
    return total


def _by_atom(halves_PA2: Ints, weight_P: Sequence[int], judge: Judge) -> tuple[Ints, Ints, int]:
    """What is left of each payload and its weight, by atom; and the largest squared norm that is left of one."""
    members, atoms, _ = halves_PA2.shape
    clip_PA, weight_PA = np.empty((2, members, atoms), np.int64)
    left = [0] * members
    # Atom by atom: whole norms do not fit an int64, and Python's integers take much more memory than the halves.
    for atom in range(atoms):
        norm2_P = [(high << _HALF_BITS) + low for high, low in halves_PA2[:, atom].tolist()]
        clip_P = judge.clip(atom, weight_P, norm2_P)
        clip_PA[:, atom], weight_PA[:, atom] = clip_P, judge.weigh(atom, weight_P, norm2_P)
        left = [total + norm2 * clip**2 for total, norm2, clip in zip(left, norm2_P, clip_P, strict=True)]
    return clip_PA, weight_PA, max(left) >> 2 * CLIP_BITS


def _gram(arrays: Any, layout: Layout, left: int, judge: Judge, threads: int) -> Ints:
    """int64 `[P, P]`: inner products of the clipped payloads in the sampled chunks that all of them have."""
    members = len(arrays.weight_PA)
    # Twice the norm: units are rounded to the nearest, which may make a value a little larger.
    shift = max(0, (2 * left).bit_length() + 1 - _PRODUCT_BITS) // 2 + 1
    chunks = judge.sample(members, layout.k)
    chunks = chunks[(arrays.rows_UC[:, chunks] >= 0).all(axis=0)]

    def work(start: int, stop: int) -> Ints:
        gram = np.zeros((members, members), np.int64)
        own = _Sampled(
            np.empty((members, layout.k), np.uint32),
            np.empty((members, layout.k), np.int64),
            np.zeros(CHUNK, np.int64),
        )
        there, mine = np.empty((2, members), np.int64), chunks[start:stop]
        if layout.is_dense:
            level = np.empty(CHUNK, np.int32)
            compare_dense(arrays, mine, dense.dense_shape(layout), shift, own, level, gram, there)
        elif layout.has_table:
            scratch = sparse_scratch(layout, members)
            compare_lookup(arrays, mine, sparse_shape(layout), shift, own, scratch, gram)
        else:
            scratch = sparse_scratch(layout, members)
            compare_sparse(arrays, mine, sparse_shape(layout), shift, own, scratch, gram, there)
        return gram

    lower = np.zeros((members, members), np.int64)
    for part in each_range(len(chunks), threads, work):
        lower += part
    return lower + np.tril(lower, -1).T


@compiled
def measure_sparse(payloads: Any, span: tuple[int, int], shape: Any, halves: Any, there: Ints) -> None:
    """Add the squared norms of chunks `span` to `halves` `[P, A, 2]`: high and low 24 bits of a unit's square."""
    rows, offsets = payloads.bytes_PB, payloads.offset_PS
    for c in range(span[0], span[1]):
        atom = payloads.atom_C[c]
        for m in range(find_members(c, payloads, there)):
            p, r = there[0, m], there[1, m]
            at_word, at_code = offsets[p, 0] + r * shape.word_bytes, offsets[p, 3] + r * shape.code_bytes
            word = np.int64(rows[p, at_word]) | (np.int64(rows[p, at_word + 1]) << 8)
            large = np.int64(0)
            for b in range(shape.code_bytes if shape.code_bits == 2 else 0):
                large += _LARGE_CODES[rows[p, at_code + b]]
            high = HIGHS[word >> SHAPE_SHIFT]
            levels = (shape.k - large) * LOW_LEVEL * LOW_LEVEL + large * high * high
            square = units_of(word & SCALE_MASK) ** 2
            halves[p, atom, 0] += (square >> _HALF_BITS) * levels
            halves[p, atom, 1] += (square & _HALF_MASK) * levels


@compiled
def measure_dense(
    payloads: Any, span: tuple[int, int], shape: Any, level: Ints32, halves: Any, there: Ints
) -> None:
    """As `measure_sparse`, of a dense codec."""
    rows, offsets, block = payloads.bytes_PB, payloads.offset_PS, shape.block
    for c in range(span[0], span[1]):
        atom = payloads.atom_C[c]
        for m in range(find_members(c, payloads, there)):
            p, r = there[0, m], there[1, m]
            dense.read_levels(rows[p], r, shape, offsets[p], level)
            for b in range(CHUNK // block):
                spot = offsets[p, 0] + r * shape.scale_bytes + 2 * b
                square = units_of(np.int64(rows[p, spot]) | (np.int64(rows[p, spot + 1]) << 8)) ** 2
                levels = np.int64(0)
                for i in range(b * block, (b + 1) * block):
                    levels += np.int64(level[i]) * level[i]
                halves[p, atom, 0] += (square >> _HALF_BITS) * levels
                halves[p, atom, 1] += (square & _HALF_MASK) * levels


@compiled
def compare_sparse(
    payloads: Any, chunks: Ints, shape: Any, shift: int, own: Any, scratch: Any, gram: Ints, there: Ints
) -> None:
    """Add the inner products of these chunks to the lower half of `gram`; of an illegal payload any number."""
    _, place, low, code, word, _, _, _, _, _, _ = scratch
    group = len(word)
    for c in chunks:
        members = find_members(c, payloads, there)
        for first in range(0, members, group):
            some = min(group, members - first)
            if read_group(payloads, first, some, there, shape, word, place, low, code):
                return
            for g in range(some):
                m = first + g
                unit = clipped(units_of(word[g] & SCALE_MASK), payloads, there[0, m], c)
                small, large = (unit * LOW_LEVEL) >> shift, (unit * HIGHS[word[g] >> SHAPE_SHIFT]) >> shift
                for i in range(shape.k):
                    kind = code[g, i] << np.uint32(2 - shape.code_bits)
                    size = large if kind & np.uint32(1) else small
                    own.place_MK[m, i] = low[g, i]
                    own.value_MK[m, i] = -size if kind & np.uint32(2) else size
        multiply(own, members, gram)


@compiled
def compare_lookup(
    payloads: Any, chunks: Ints, shape: Any, shift: int, own: Any, scratch: Any, gram: Ints
) -> None:
    """As `compare_sparse`, of `lookup2`."""
    for c in chunks:
        members = lookup.place_lookup(payloads, c, shape, shift, own, scratch)
        if members < 0:
            return
        multiply(own, members, gram)


@compiled
def compare_dense(
    payloads: Any, chunks: Ints, shape: Any, shift: int, own: Any, level: Ints32, gram: Ints, there: Ints
) -> None:
    """As `compare_sparse`, of a dense codec."""
    rows, offsets, block = payloads.bytes_PB, payloads.offset_PS, shape.block
    for c in chunks:
        members = find_members(c, payloads, there)
        for m in range(members):
            p, r = there[0, m], there[1, m]
            if dense.read_levels(rows[p], r, shape, offsets[p], level):
                return
            for i in range(CHUNK):
                spot = offsets[p, 0] + r * shape.scale_bytes + 2 * (i // block)
                unit = units_of(np.int64(rows[p, spot]) | (np.int64(rows[p, spot + 1]) << 8))
                size = (np.int64(abs(level[i])) * clipped(unit, payloads, p, c)) >> shift
                own.place_MK[m, i] = i
                own.value_MK[m, i] = -size if level[i] < 0 else size
        multiply(own, members, gram)


@compiled
def multiply(own: Any, members: int, gram: Ints) -> None:
    """Add the inner products of one chunk's sparse rows to the lower half of `gram`."""
    row = own.row
    for j in range(members):
        for i in range(own.place_MK.shape[1]):
            row[np.uint64(own.place_MK[j, i])] = own.value_MK[j, i]
        for m in range(j + 1):
            total = np.int64(0)
            for i in range(own.place_MK.shape[1]):
                total += own.value_MK[m, i] * row[np.uint64(own.place_MK[m, i])]
            gram[j, m] += total
        for i in range(own.place_MK.shape[1]):
            row[np.uint64(own.place_MK[j, i])] = 0
