"""What a reduction needs of the codec and of the mean, handed in: rooms of `node` do not know each other."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from atoll.protocols.errors import DecodeError
from atoll.protocols.ledger.rows import join_rows, row_bytes, silent_row, split_rows

Weighted = tuple[int, Tensor, Tensor]
"""Weight, index_Ck int64, q_Ck int64 (units of 2⁻²⁶; 0: nothing was sent)."""


class Decode(Protocol):
    """`sparse2.decode`."""

    def __call__(self, payload: bytes | memoryview, chunks: int, k: int) -> tuple[Tensor, Tensor]:
        """index_Ck and q_Ck, int64. Raises DecodeError."""


class Arithmetic(NamedTuple):
    """The agreed arithmetic of a round."""

    encode: Callable[[Tensor, int], bytes]
    """Payload of float32 `[C, 4096]` with k values per chunk; the same bytes on every machine."""
    decode: Decode
    sums: Callable[[Sequence[Weighted]], tuple[Tensor, Tensor]]
    """Σ weight·q and the weight that sent, int64 `[C, 4096]` each."""
    divisor: Callable[[Tensor, int, int], Tensor]
    """Of the weight that sent, all weight, and floor_256."""
    rounded: Callable[[Tensor, Tensor], Tensor]
    """numerator / denominator to the nearest integer, halves away from zero."""
    step: Callable[[Tensor, Tensor, int], Tensor]
    """-α·numerator / divisor in units of 2⁻²⁴; of numerator, divisor and alpha_256."""


def decode_rows(rows: bytes, k: int, arithmetic: Arithmetic) -> tuple[Tensor, Tensor]:
    """index_Ck and q_Ck of a contributor's rows; a row that is no legal one is silent."""
    payload = join_rows(rows, k)
    chunks = len(rows) // row_bytes(k)
    try:
        return arithmetic.decode(payload, chunks, k)
    except DecodeError:
        each = [row if _is_legal(row, k, arithmetic) else silent_row(k) for row in split_rows(rows, k)]
        return arithmetic.decode(join_rows(b"".join(each), k), chunks, k)


def _is_legal(row: bytes, k: int, arithmetic: Arithmetic) -> bool:
    try:
        arithmetic.decode(join_rows(row, k), 1, k)
    except DecodeError:
        return False
    return True
