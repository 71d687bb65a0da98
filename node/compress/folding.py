"""R payloads -> U, or θ + U, in one compiled pass over the chunks, in exact integers.

The bits of `decode` and `aggregate.mean.outer_update`, which the tests hold it against.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from atoll.node.compress.encoding import each_range, ranges_of
from atoll.node.compress.reading import SPARE
from atoll.node.compress.sparse_fold import FAULTS, LEFT_RANGE, fold_sparse, scratch_for
from atoll.protocols.arena import CHUNK
from atoll.protocols.errors import DecodeError, Divergence
from atoll.protocols.payload import Layout, check_frame
from atoll.protocols.records import MAX_SET, MAX_WEIGHT


class Step(NamedTuple):
    """How a mean becomes an outer step; from the RunSpec."""

    alpha_256: int
    floor_256: int


def check(payload: bytes, chunks: int, k: int) -> None:
    """Raise DecodeError unless these bytes are a legal payload."""
    _run([(1, payload)], Layout(chunks, k), Step(0, 0), 1, (_nothing(), _nothing(), _nothing()))


def update_of(
    members: Sequence[tuple[int, bytes]], chunks: int, k: int, step: Step, *, threads: int = 1
) -> Tensor:
    """U int32 `[chunks, 4096]`, units of 2⁻²⁴, of (weight, payload) of one round's set, each given once.

    Raises DecodeError for an illegal payload or weight and for more than 1024 members.
    """
    update = torch.empty((chunks, CHUNK), dtype=torch.int32)
    _run(members, Layout(chunks, k), step, threads, (update, _nothing(), _nothing()))
    return update


def fold_into(
    theta_C4096: Tensor,
    members: Sequence[tuple[int, bytes]],
    k: int,
    step: Step,
    out_C4096: Tensor,
    *,
    threads: int = 1,
) -> None:
    """θ + U into `out_C4096`, in the same pass and without storing U; both int32. Padding is left to the caller.

    Raises DecodeError and, where a weight leaves ±128, Divergence; θ is never changed.
    """
    _run(members, Layout(len(theta_C4096), k), step, threads, (_nothing(), theta_C4096, out_C4096))


def _nothing() -> Tensor:
    return torch.empty((0, CHUNK), dtype=torch.int32)


def _run(
    members: Sequence[tuple[int, bytes]], layout: Layout, step: Step, threads: int, arrays: tuple[Tensor, ...]
) -> None:
    if len(members) > MAX_SET or not all(1 <= weight <= MAX_WEIGHT for weight, _ in members):
        raise DecodeError("a set with too many members, or with an illegal weight")
    rows = _rows([payload for _, payload in members], layout)
    weights = np.array([weight for weight, _ in members], np.int64)
    rule = (step.alpha_256, max(1, -(-step.floor_256 * int(weights.sum()) // 256)))
    facts = (layout.k, layout.low_bits, layout.high_bits, *layout.row_bytes, *layout.offsets)
    given = tuple(each.numpy() for each in arrays)

    def work(start: int, stop: int) -> int:
        return fold_sparse(rows, weights, (start, stop), facts, rule, given, scratch_for(layout))

    _raise(each_range(ranges_of(layout.chunks, threads), work))


def _rows(payloads: Sequence[bytes], layout: Layout) -> npt.NDArray[np.uint8]:
    """The payloads with room behind each. Raises DecodeError for a wrong length or header."""
    rows = np.empty((len(payloads), layout.size_bytes + SPARE), np.uint8)
    for row, payload in zip(rows, payloads, strict=True):
        check_frame(payload, layout)
        row[: layout.size_bytes] = np.frombuffer(payload, np.uint8)
    return rows


def _raise(faults: list[int]) -> None:
    worst = max(faults, default=0)
    if worst == LEFT_RANGE:
        raise Divergence("a weight left its range of -128 … 128")
    if worst:
        raise DecodeError(f"payload: {FAULTS[worst]}")
