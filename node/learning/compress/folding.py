"""R payloads -> U, or θ + U, in one compiled pass over the chunks, in exact integers.

A payload may hold some of the chunks only: "all weight", of which the floor is a share, is the weight of those who
cover the chunk. The bits of `decode` and `aggregate.mean.outer_update`, which the tests hold it against.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from atoll.node.learning.compress import dense, sparse_fold
from atoll.node.learning.compress.covering import Rows, size_covered
from atoll.node.learning.compress.encoding import each_range, ranges_of
from atoll.node.learning.compress.reading import SPARE
from atoll.node.learning.kernels.streaming import ALIGN_BYTES
from atoll.protocols.errors import MODEL_LOST, DecodeError, Divergence
from atoll.protocols.ledger.records import MAX_SET, MAX_WEIGHT
from atoll.protocols.run.arena import CHUNK
from atoll.protocols.run.payload import Layout, check_frame

Payload: TypeAlias = bytes | memoryview
Member: TypeAlias = tuple[int, Payload] | tuple[int, Payload, Rows | None]
"""Weight and payload; which of the chunks it has, where that is not all."""


class RowOffsets(NamedTuple):
    """Where the rows of each payload lie."""

    rows_UC: npt.NDArray[np.int32]
    """The different maps of chunks to rows; −1: the payload has no such chunk."""
    map_P: npt.NDArray[np.int64]
    """Which map a payload has."""
    offset_PS: npt.NDArray[np.int64]
    """Where each section of a payload begins."""


class Given(NamedTuple):
    """Payloads as the kernels take them."""

    bytes: npt.NDArray[np.uint8]
    places: RowOffsets
    weight_P: npt.NDArray[np.int64]


class OuterStep(NamedTuple):
    """How a mean becomes an outer step; from the RunSpec."""

    alpha_256: int
    floor_256: int


def check(payload: bytes | memoryview, chunks: int, k: int, *, codec: str) -> None:
    """Raise DecodeError unless these bytes are a legal payload."""
    _run([(1, payload)], Layout(codec, chunks, k), OuterStep(0, 0), 1, (_nothing(), _nothing(), _nothing()))


def update_of(
    members: Sequence[Member], chunks: int, k: int, step: OuterStep, *,
    codec: str, threads: int = 1,
) -> Tensor:  # fmt: skip
    """U int32 `[chunks, 4096]`, units of 2⁻²⁴, of (weight, payload) of one round's set, each given once.

    Raises DecodeError for an illegal payload or weight and for more than 1024 members.
    """
    update = torch.empty((chunks, CHUNK), dtype=torch.int32)
    _run(members, Layout(codec, chunks, k), step, threads, (update, _nothing(), _nothing()))
    return update


def fold_into(
    theta_C4096: Tensor,
    members: Sequence[Member],
    k: int,
    step: OuterStep,
    out_C4096: Tensor,
    *,
    codec: str,
    threads: int = 1,
) -> None:
    """θ + U into `out_C4096`, in the same pass and without storing U; both int32. Padding is left to the caller.

    Raises DecodeError and, where a weight leaves ±128, Divergence; θ is never changed. ValueError for an array
    that does not begin at a multiple of 64 bytes, as all of torch's own do.
    """
    if out_C4096.data_ptr() % ALIGN_BYTES or not (theta_C4096.is_contiguous() and out_C4096.is_contiguous()):
        raise ValueError("the sum needs arrays in one piece, and the result's aligned to 64 bytes")
    _run(members, Layout(codec, len(theta_C4096), k), step, threads, (_nothing(), theta_C4096, out_C4096))


def give_back(residual_C4096: Tensor, payload: bytes | memoryview, k: int, *, codec: str) -> None:
    """Add what a payload said to `residual_C4096` (float32). Raises DecodeError, with the residual as it was."""
    layout = Layout(codec, len(residual_C4096), k)
    check(payload, layout.chunks, k, codec=codec)
    given, span, residual = given_of([(1, payload)], layout), (0, layout.chunks), residual_C4096.numpy()
    if layout.is_dense:
        facts = dense.dense_facts(layout)
        _raise(
            [dense.add_dense(given.bytes, span, facts, given.places, residual, dense.dense_scratch(facts[0])[0])]
        )
    else:
        facts, own = sparse_fold.sparse_facts(layout), sparse_fold.scratch_for(layout, 1)
        _raise([sparse_fold.add_sparse(given.bytes, span, facts, given.places, residual, own)])


def _nothing() -> Tensor:
    return torch.empty((0, CHUNK), dtype=torch.int32)


def _run(
    members: Sequence[Member], layout: Layout, step: OuterStep, threads: int, arrays: tuple[Tensor, ...]
) -> None:
    given = given_of(members, layout)
    rule, out = (step.alpha_256, step.floor_256), tuple(each.numpy() for each in arrays)

    def work(start: int, stop: int) -> int:
        if layout.is_dense:
            facts = dense.dense_facts(layout)
            own = *dense.dense_scratch(facts[0]), np.empty((2, len(members)), np.int64)
            return dense.fold_dense(
                given.bytes, given.weight_P, (start, stop), facts, given.places, rule, out, own
            )
        facts, own = sparse_fold.sparse_facts(layout), sparse_fold.scratch_for(layout, len(members))
        return sparse_fold.fold_sparse(
            given.bytes, given.weight_P, (start, stop), facts, given.places, rule, out, own
        )

    _raise(each_range(ranges_of(layout.chunks, threads), work))


def given_of(members: Sequence[Member], layout: Layout) -> Given:
    """The payloads with room behind each. Raises DecodeError for a wrong length or header, or an illegal set."""
    if len(members) > MAX_SET or not all(1 <= member[0] <= MAX_WEIGHT for member in members):
        raise DecodeError("a set with too many members, or with an illegal weight")
    rows = [member[2] if len(member) == 3 else None for member in members]
    layouts = [msgspec.structs.replace(layout, chunks=size_covered(each, layout.chunks)) for each in rows]
    largest = max((each.size_bytes for each in layouts), default=0)
    found = np.empty((len(members), largest + SPARE), np.uint8)
    for line, member, own in zip(found, members, layouts, strict=True):
        check_frame(member[1], own)
        line[: own.size_bytes] = np.frombuffer(member[1], np.uint8)
        line[own.size_bytes : own.size_bytes + SPARE] = 0
    offsets = np.array([own.offsets for own in layouts], np.int64).reshape(len(members), len(layout.offsets))
    weight = np.array([member[0] for member in members], np.int64)
    return Given(found, RowOffsets(*_maps(rows, layout.chunks), offsets), weight)


def _maps(rows: Sequence[Rows | None], chunks: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """The different maps of chunks to rows `[U, C]`, and which of them is whose."""
    numbers: dict[int, int] = {}
    maps: list[Rows] = []
    for each in rows:
        if id(each) not in numbers:
            numbers[id(each)] = len(maps)
            maps.append(np.arange(chunks, dtype=np.int32) if each is None else each)
    which = np.array([numbers[id(each)] for each in rows], np.int64)
    return np.stack(maps) if maps else np.empty((0, chunks), np.int32), which


def _raise(faults: list[int]) -> None:
    worst = max(faults, default=0)
    if worst in (sparse_fold.LEFT_RANGE, dense.LEFT_RANGE):
        raise Divergence("a weight left its range of -128 … 128", hint=MODEL_LOST)
    if worst:
        raise DecodeError(f"payload: {dense.FAULTS.get(worst) or sparse_fold.FAULTS[worst]}")
