"""The outer step of a set whose size and weights are checked first, as the compiled fold checks them."""

from typing import Any

from atoll.node.learning.outer import mean
from atoll.node.learning.reduction.reducing import Arithmetic
from atoll.protocols.errors import DecodeError
from atoll.protocols.ledger.records import MAX_SET, MAX_WEIGHT
from tests.plain import sparse2

PLAIN = Arithmetic(sparse2.encode, sparse2.decode, mean.weighted_mean, mean.outer_update)
"""The arithmetic of reductions with the codec in plain torch."""


def outer_update(members: Any, chunks: Any, alpha_256: int, floor_256: int) -> Any:
    """U of one round's set. Raises DecodeError for more than 1024 members or a weight outside 1 … 255."""
    if len(members) > MAX_SET or not all(1 <= weight <= MAX_WEIGHT for weight, _, _ in members):
        raise DecodeError("a set with too many members, or with an illegal weight")
    return mean.outer_update(members, chunks, alpha_256, floor_256)
