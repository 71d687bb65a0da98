"""R payloads -> U, or θ + U, in one compiled pass over the chunks, in exact integers.

The bits of `decode` and `aggregate.mean.outer_update`, which the tests hold it against.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from atoll.node.compress import dense, sparse_fold
from atoll.node.compress.encoding import each_range, ranges_of
from atoll.node.compress.reading import SPARE
from atoll.protocols.arena import CHUNK
from atoll.protocols.errors import MODEL_LOST, DecodeError, Divergence
from atoll.protocols.payload import Layout, check_frame
from atoll.protocols.records import MAX_SET, MAX_WEIGHT

Member = tuple[int, bytes | memoryview]
"""Weight and payload."""


class Step(NamedTuple):
    """How a mean becomes an outer step; from the RunSpec."""

    alpha_256: int
    floor_256: int


def check(payload: bytes | memoryview, chunks: int, k: int, *, codec: str) -> None:
    """Raise DecodeError unless these bytes are a legal payload."""
    _run([(1, payload)], Layout(codec, chunks, k), Step(0, 0), 1, (_nothing(), _nothing(), _nothing()))


def update_of(
    members: Sequence[Member], chunks: int, k: int, step: Step, *,
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
    step: Step,
    out_C4096: Tensor,
    *,
    codec: str,
    threads: int = 1,
) -> None:
    """θ + U into `out_C4096`, in the same pass and without storing U; both int32. Padding is left to the caller.

    Raises DecodeError and, where a weight leaves ±128, Divergence; θ is never changed.
    """
    _run(members, Layout(codec, len(theta_C4096), k), step, threads, (_nothing(), theta_C4096, out_C4096))


def give_back(residual_C4096: Tensor, payload: bytes | memoryview, k: int, *, codec: str) -> None:
    """Add what a payload said to `residual_C4096` (float32). Raises DecodeError, with the residual as it was."""
    layout = Layout(codec, len(residual_C4096), k)
    check(payload, layout.chunks, k, codec=codec)
    rows, span, residual = _rows([payload], layout), (0, layout.chunks), residual_C4096.numpy()
    if layout.is_dense:
        facts = dense.dense_facts(layout)
        _raise([dense.add_dense(rows[0], span, facts, residual, dense.dense_scratch(facts[0])[0])])
    else:
        facts, own = sparse_fold.sparse_facts(layout), sparse_fold.scratch_for(layout)
        _raise([sparse_fold.add_sparse(rows, span, facts, residual, own)])


def _nothing() -> Tensor:
    return torch.empty((0, CHUNK), dtype=torch.int32)


def _run(members: Sequence[Member], layout: Layout, step: Step, threads: int, arrays: tuple[Tensor, ...]) -> None:
    if len(members) > MAX_SET or not all(1 <= weight <= MAX_WEIGHT for weight, _ in members):
        raise DecodeError("a set with too many members, or with an illegal weight")
    rows = _rows([payload for _, payload in members], layout)
    weights = np.array([weight for weight, _ in members], np.int64)
    rule = (step.alpha_256, max(1, -(-step.floor_256 * int(weights.sum()) // 256)))
    given = tuple(each.numpy() for each in arrays)

    def work(start: int, stop: int) -> int:
        if layout.is_dense:
            facts = dense.dense_facts(layout)
            own = dense.dense_scratch(facts[0])
            return dense.fold_dense(rows, weights, (start, stop), facts, rule, given, own)
        facts, own = sparse_fold.sparse_facts(layout), sparse_fold.scratch_for(layout)
        return sparse_fold.fold_sparse(rows, weights, (start, stop), facts, rule, given, own)

    _raise(each_range(ranges_of(layout.chunks, threads), work))


def _rows(payloads: Sequence[bytes | memoryview], layout: Layout) -> npt.NDArray[np.uint8]:
    """The payloads with room behind each. Raises DecodeError for a wrong length or header."""
    rows = np.empty((len(payloads), layout.size_bytes + SPARE), np.uint8)
    for row, payload in zip(rows, payloads, strict=True):
        check_frame(payload, layout)
        row[: layout.size_bytes] = np.frombuffer(payload, np.uint8)
    return rows


def _raise(faults: list[int]) -> None:
    worst = max(faults, default=0)
    if worst in (sparse_fold.LEFT_RANGE, dense.LEFT_RANGE):
        raise Divergence("a weight left its range of -128 … 128", hint=MODEL_LOST)
    if worst:
        raise DecodeError(f"payload: {dense.FAULTS.get(worst) or sparse_fold.FAULTS[worst]}")
