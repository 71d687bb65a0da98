"""R payloads -> θ + U in one compiled pass over the chunks, in exact integers; and payloads checked and decoded.

A payload may hold some of the chunks only: "all weight", of which the floor is a share, is the weight of those who
cover the chunk. The tests hold the bits against the definition, `outer.mean.outer_update` of the decoded tables.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor

from atoll.node.learning.compress import dense, lookup, sparse_fold
from atoll.node.learning.compress.measuring import WHOLE, Judge, judged
from atoll.node.learning.compress.reading import SPARE, sparse_shape
from atoll.node.learning.kernels.compiled import ALIGN_BYTES, Bytes, Ints, Ints32, each_range
from atoll.node.learning.outer.rules.landing import PLAIN, Landing
from atoll.protocols.errors import MODEL_LOST, DecodeError, Divergence
from atoll.protocols.ledger.coverage import Cover, size_of
from atoll.protocols.ledger.records import MAX_SET, MAX_WEIGHT
from atoll.protocols.run.arena import CHUNK
from atoll.protocols.run.payload import VALUE_BITS, Layout, check_frame

Payload: TypeAlias = bytes | memoryview
Rows: TypeAlias = Ints32
"""For each chunk of a round the row of a payload that holds it, −1 for none; `[chunks]`, read-only."""
_SLAB_CHUNKS = 256


class PayloadArrays(NamedTuple):
    """The P payloads of one call as the kernels read them."""

    bytes_PB: Bytes
    """Each payload, with SPARE zero bytes behind it."""
    weight_PA: Ints
    """Weight of each payload in each atom."""
    offset_PS: Ints
    """Where each section of a payload begins."""
    map_P: Ints
    """Which map of chunks to rows a payload has."""
    rows_UC: Ints32
    """The different maps; −1: the payload has no such chunk."""
    clip_PA: Ints
    """What is left of each payload in each atom, in units of 1 / WHOLE; at most WHOLE."""
    atom_C: Ints32
    """Which atom each chunk belongs to."""


class OuterStep(NamedTuple):
    """How a mean becomes an outer step; from the RunSpec."""

    alpha_256: int
    floor_256: int


class Tables(NamedTuple):
    """A decoded payload of a sparse codec."""

    index_Ck: Tensor
    """Places in the chunk, int64, rising, 0 … 4095."""
    q_Ck: Tensor
    """int64, units of 2⁻²⁶. A row of zeros says that the author sends nothing of this chunk."""


@lru_cache(maxsize=64)
def rows_of(part: Cover, whole: Cover) -> Rows:
    """Rows of a payload of `part` in a round of `whole`; each span of `part` lies in one of `whole`. Cached."""
    # Both covers rise, so one walk over the whole finds the row of each span.
    found = np.full(size_of(whole), -1, np.int32)
    # One array for equal covers, told apart by identity in `folding`: so it is read-only.
    first, row, at = 0, 0, 0
    for span in part:
        while whole[at].stop <= span.start:
            first, at = first + whole[at].stop - whole[at].start, at + 1
        begin, size = first + span.start - whole[at].start, span.stop - span.start
        found[begin : begin + size] = np.arange(row, row + size, dtype=np.int32)
        row += size
    found.setflags(write=False)
    return found


def size_covered(rows: Rows | None, chunks: int) -> int:
    """Number of chunks that a payload has in a round of `chunks` chunks."""
    return chunks if rows is None else int(rows.max(initial=-1)) + 1


def check(payload: Payload, layout: Layout) -> None:
    """Raise DecodeError unless these bytes are a legal payload."""
    nothing = torch.empty((0, CHUNK), dtype=torch.int32)
    _run(_arrays_of([1], [payload], [None], layout), layout, OuterStep(0, 0), nothing, nothing, threads=1)


def fold_into(
    out_C4096: Tensor,
    theta_C4096: Tensor,
    weights: Sequence[int],
    payloads: Sequence[Payload],
    rows: Sequence[Rows | None],
    layout: Layout,
    step: OuterStep,
    *,
    judge: Judge | None = None,
    landing: Landing = PLAIN,
    threads: int = 1,
) -> None:
    """θ + U of one round's set into `out_C4096`; both int32. U is never stored; padding is left to the caller.

    `landing`: a rule's step instead, for a sparse codec. Both arrays are whole states then, and only rows of the
    round's chunks are written.

    `rows`: which row of a payload holds which chunk; None where it has all. `judge` clips and weighs the payloads
    first; without one each counts as it is. Raises DecodeError for an illegal payload or weight and for more than
    1024 members; Divergence where a weight leaves ±128. θ is never changed. ValueError for an array that does not
    begin at a multiple of 64 bytes, as all of torch's own do.
    """
    # A processor refuses a streaming store to an address that is not a multiple of its width.
    if out_C4096.data_ptr() % ALIGN_BYTES or not (theta_C4096.is_contiguous() and out_C4096.is_contiguous()):
        raise ValueError("the sum needs arrays in one piece, and the result's aligned to 64 bytes")
    arrays = _arrays_of(weights, payloads, rows, layout)
    if judge is not None:
        arrays = judged(arrays, layout, judge, threads)
    _run(arrays, layout, step, theta_C4096, out_C4096, landing=landing, threads=threads)


def decode(payload: Payload, layout: Layout) -> Tables:
    """Tables of the one legal sparse payload that these bytes are. Raises DecodeError, nothing else."""
    index = np.empty((layout.chunks, layout.k), np.int64)
    q = np.empty_like(index)
    arrays, scratch = _arrays_of([1], [payload], [None], layout), sparse_fold.sparse_scratch(layout, 1)
    decode_chunks = lookup.decode_lookup if layout.has_table else sparse_fold.decode_sparse
    _raise([decode_chunks(arrays, sparse_shape(layout), index, q, scratch)])
    return Tables(torch.from_numpy(index), torch.from_numpy(q))


def give_back(residual_C4096: Tensor, payload: Payload, layout: Layout) -> None:
    """Add the values of a payload to `residual_C4096` (float32). Raises DecodeError with the residual intact."""
    if layout.is_dense:
        # checked whole before: a fault in the last chunk must not leave the others added
        check(payload, layout)
        arrays, shape = _arrays_of([1], [payload], [None], layout), dense.dense_shape(layout)
        _raise([dense.add_dense(arrays, shape, residual_C4096.numpy(), dense.dense_scratch(shape.block)[0])])
        return
    index_Ck, q_Ck = decode(payload, layout)
    for start in range(0, layout.chunks, _SLAB_CHUNKS):
        part = slice(start, start + _SLAB_CHUNKS)
        # exact: a q has at most 15 significant bits, a float32 has 24
        values = q_Ck[part].to(torch.float32).mul_(2.0**-VALUE_BITS)
        residual_C4096[part].scatter_add_(1, index_Ck[part], values)


def _run(
    arrays: PayloadArrays, layout: Layout, step: OuterStep, theta: Tensor, out: Tensor,
    *, landing: Landing = PLAIN, threads: int,
) -> None:  # fmt: skip
    members, rule = len(arrays.weight_PA), (step.alpha_256, step.floor_256)

    def work(start: int, stop: int) -> int:
        span = (start, stop)
        if layout.is_dense:
            dense_shape = dense.dense_shape(layout)
            own = *dense.dense_scratch(dense_shape.block), np.empty((2, members), np.int64)
            return dense.fold_dense(arrays, span, dense_shape, rule, theta.numpy(), out.numpy(), own)
        shape, scratch = sparse_shape(layout), sparse_fold.sparse_scratch(layout, members)
        fold = lookup.fold_lookup if layout.has_table else sparse_fold.fold_sparse
        return fold(arrays, span, shape, rule, landing.own(), theta.numpy(), out.numpy(), scratch)

    # Chunks are independent, so how they are shared among threads cannot show in the result.
    _raise(each_range(layout.chunks, threads, work))


def _arrays_of(
    weights: Sequence[int], payloads: Sequence[Payload], rows: Sequence[Rows | None], layout: Layout
) -> PayloadArrays:
    """The payloads with room behind each. Raises DecodeError for a wrong length or header, or an illegal set."""
    check_weights(weights)
    layouts = [msgspec.structs.replace(layout, chunks=size_covered(each, layout.chunks)) for each in rows]
    largest = max((each.size_bytes for each in layouts), default=0)
    bytes_PB = np.empty((len(payloads), largest + SPARE), np.uint8)
    for line, payload, own in zip(bytes_PB, payloads, layouts, strict=True):
        check_frame(payload, own)
        line[: own.size_bytes] = np.frombuffer(payload, np.uint8)
        # A group of fields may be read past the end of a payload: into zeros, never into another payload.
        line[own.size_bytes : own.size_bytes + SPARE] = 0
    # One map per cover, not per payload: most members of a round cover the same chunks.
    maps: dict[int, Rows] = {}
    for each in rows:
        maps.setdefault(id(each), np.arange(layout.chunks, dtype=np.int32) if each is None else each)
    numbers = {key: number for number, key in enumerate(maps)}
    return PayloadArrays(
        bytes_PB=bytes_PB,
        weight_PA=np.array(weights, np.int64).reshape(-1, 1),
        offset_PS=np.array([own.offsets for own in layouts], np.int64).reshape(len(rows), len(layout.offsets)),
        map_P=np.array([numbers[id(each)] for each in rows], np.int64),
        rows_UC=np.stack(list(maps.values())) if maps else np.empty((0, layout.chunks), np.int32),
        clip_PA=np.full((len(rows), 1), WHOLE, np.int64),
        atom_C=np.zeros(layout.chunks, np.int32),
    )


def check_weights(weights: Sequence[int]) -> None:
    """Raise DecodeError for an illegal set: more members or weight could overflow a sum of `outer.mean`."""
    if len(weights) > MAX_SET or not all(1 <= weight <= MAX_WEIGHT for weight in weights):
        raise DecodeError("a set with too many members, or with an illegal weight")


def _raise(faults: list[int]) -> None:
    worst = max(faults, default=0)
    if worst in (sparse_fold.LEFT_RANGE, dense.LEFT_RANGE, lookup.LEFT_RANGE):
        raise Divergence("a weight left its range of -128 … 128", hint=MODEL_LOST)
    if worst:
        raise DecodeError(f"payload: {(dense.FAULTS | lookup.FAULTS).get(worst) or sparse_fold.FAULTS[worst]}")
