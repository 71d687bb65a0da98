"""Which rows of a payload belong to which chunks of a round, where a contribution covers only some of them."""

from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from atoll.protocols.ledger.coverage import Cover, size_of

Rows: TypeAlias = npt.NDArray[np.int32]
"""For each chunk of a round the row of a payload that holds it, −1 for none; `[chunks]`, read-only."""


@lru_cache(maxsize=64)
def rows_of(part: Cover, whole: Cover) -> Rows:
    """Rows of a payload of `part` in a round of `whole`; each span of `part` lies in one of `whole`. Cached."""
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
