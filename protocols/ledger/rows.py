"""Rows of a payload: the bytes of one chunk each, cut out, committed to by a Merkle root, and joined again.

A row is the chunk's word, lows, highs and codes, one after the other (`protocols/run/payload.py`); its size
follows from k. An illegal row counts as silent: all zeros, on every node alike.
"""

from collections.abc import Sequence
from typing import NamedTuple

from atoll.protocols.errors import DecodeError
from atoll.protocols.ids import Digest
from atoll.protocols.merkle import MerklePart, leaf_of, levels_of, path_of
from atoll.protocols.run.arena import Span
from atoll.protocols.run.payload import Layout, check_frame


class RowTree:
    """The Merkle tree over all rows of a payload, from which its author serves parts."""

    def __init__(self, payload: bytes | memoryview, layout: Layout) -> None:
        """Cut the payload. Raises DecodeError for a wrong length or header."""
        self._rows = cut_rows(payload, layout)
        self._levels = levels_of(map(leaf_of, self._rows))

    @property
    def root(self) -> Digest:
        """Merkle root: the field `rows` of the record that offers the payload."""
        return self._levels[-1][0]

    def part(self, span: Span) -> tuple[bytes, bytes]:
        """Rows of the chunks in `span`, end to end, and their Merkle path."""
        return b"".join(self._rows[span.start : span.stop]), path_of(self._levels, span.start, span.chunks)


def check_root(payload: bytes | memoryview, layout: Layout, root: bytes) -> None:
    """Raise DecodeError unless the rows of a payload have this root."""
    if RowTree(payload, layout).root != root:
        raise DecodeError("payload: its rows have another root than the record says")


def row_bytes(k: int) -> int:
    """Size in bytes of one row with `k` values."""
    return sum(Layout("sparse2", 1, k).row_bytes)


def cut_rows(payload: bytes | memoryview, layout: Layout) -> list[bytes]:
    """All rows of a payload. Raises DecodeError for a wrong length or header."""
    check_frame(payload, layout)
    view = memoryview(payload)
    places = list(zip(layout.offsets, layout.row_bytes, strict=True))
    return [
        b"".join([view[at + chunk * size : at + (chunk + 1) * size] for at, size in places])
        for chunk in range(layout.chunks)
    ]


def join_rows(rows: bytes | memoryview, k: int) -> bytes:
    """The payload made of rows that lie end to end. Raises DecodeError if the last row is incomplete."""
    size = row_bytes(k)
    if len(rows) % size:
        raise DecodeError("rows: a row is cut")
    layout, view = Layout("sparse2", len(rows) // size, k), memoryview(rows)
    parts: list[bytes | memoryview] = [layout.header]
    at = 0
    for width in layout.row_bytes:
        parts += [view[start + at : start + at + width] for start in range(0, len(view), size)]
        at += width
    return b"".join(parts)


def silent_row(k: int) -> bytes:
    """The row whose values are all zero: scale 0, indices 0 … k - 1."""
    layout = Layout("sparse2", 1, k)
    lows = sum((index & (1 << layout.low_bits) - 1) << index * layout.low_bits for index in range(k))
    highs = sum(1 << (index >> layout.low_bits) + index for index in range(k))
    _, low_size, high_size, code_size = layout.row_bytes
    return bytes(2) + lows.to_bytes(low_size, "little") + highs.to_bytes(high_size, "little") + bytes(code_size)


class RowPart(NamedTuple):
    """Verified rows of neighbouring chunks of a peer's payload."""

    span: Span
    rows: bytes
    tree: MerklePart

    def some(self, span: Span, k: int) -> tuple[bytes, bytes]:
        """The rows of some of the chunks, end to end, and their own Merkle path."""
        at = (span.start - self.span.start) * row_bytes(k)
        return self.rows[at : at + span.chunks * row_bytes(k)], self.tree.path(span.start, span.chunks)


def checked_rows(root: Digest, chunks: int, k: int, span: Span, rows: bytes, path: bytes) -> RowPart:
    """Rows of `span`, verified against the root of a payload of `chunks` chunks. Raises DecodeError."""
    if len(rows) != span.chunks * row_bytes(k):
        raise DecodeError("rows: not as many bytes as the chunks have")
    part = MerklePart(chunks, span.start, [leaf_of(row) for row in split_rows(rows, k)], path)
    if part.root != root:
        raise DecodeError("rows: not those of the payload")
    return RowPart(span, rows, part)


def split_rows(rows: bytes, k: int) -> Sequence[bytes]:
    """The single rows of bytes in which rows lie end to end."""
    size = row_bytes(k)
    return [rows[at : at + size] for at in range(0, len(rows), size)]
