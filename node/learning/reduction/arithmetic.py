"""What a reduction needs of the codec and of the mean, handed in: learning's leaves do not know each other."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from atoll.protocols.errors import DecodeError
from atoll.protocols.ledger.rows import join_rows, row_bytes, silent_row, split_rows

Weighted = tuple[int, Tensor, Tensor]
"""Weight, index_Ck int64, q_Ck int64 (units of 2⁻²⁶; 0: nothing was sent)."""


class Decode(Protocol):
    """A decoder of `sparse2` payloads."""

    def __call__(self, payload: bytes | memoryview, chunks: int, k: int) -> tuple[Tensor, Tensor]:
        """index_Ck and q_Ck, int64. Raises DecodeError."""


class Arithmetic(NamedTuple):
    """The agreed arithmetic of a round."""

    encode: Callable[[Tensor, int], bytes]
    """Payload of float32 `[C, 4096]` with k values per chunk; the same bytes on every machine."""
    decode: Decode
    weighted_mean: Callable[[Sequence[Weighted], int], Tensor]
    """Mean of members with a floor_256: int64 `[C, 4096]`, units of 2⁻²⁶."""
    outer_update: Callable[[Sequence[Weighted], int, int, int], Tensor]
    """U int32 `[C, 4096]`, units of 2⁻²⁴, of members, chunks, alpha_256 and floor_256."""


def decode_rows(rows: bytes, k: int, arithmetic: Arithmetic) -> tuple[Tensor, Tensor]:
    """index_Ck and q_Ck of a contributor's rows; a row that is not legal counts as silent."""
    payload = join_rows(rows, k)
    chunks = len(rows) // row_bytes(k)
    try:
        return arithmetic.decode(payload, chunks, k)
    except DecodeError:
        # Row by row, only now: the signed root vouches for illegal rows too, so they need one agreed meaning.
        each = [row if _is_legal(row, k, arithmetic) else silent_row(k) for row in split_rows(rows, k)]
        return arithmetic.decode(join_rows(b"".join(each), k), chunks, k)


def _is_legal(row: bytes, k: int, arithmetic: Arithmetic) -> bool:
    try:
        arithmetic.decode(join_rows(row, k), 1, k)
    except DecodeError:
        return False
    return True
