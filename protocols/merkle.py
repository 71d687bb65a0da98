"""Merkle trees over BLAKE3: one digest commits to a row of leaves, and a path proves any neighbouring leaves.

A leaf is BLAKE3(0 ‖ data), a node BLAKE3(1 ‖ left ‖ right); a node without a neighbour moves up unchanged. A
verifier knows the number of leaves from elsewhere (the RunSpec), so a tree has one shape.
R. Merkle, "A Digital Signature Based on a Conventional Encryption Function", 1987.
"""

from collections.abc import Iterable, Iterator, Sequence

from atoll.protocols.errors import DecodeError
from atoll.protocols.ids import DIGEST_BYTES, Digest, digest

_LEAF, _NODE = b"\0", b"\1"


def leaf_of(data: bytes | memoryview) -> Digest:
    """BLAKE3 digest of one leaf's data, in the domain of leaves."""
    return digest(_LEAF, data)


def levels_of(leaves: Iterable[Digest]) -> list[list[Digest]]:
    """All levels of the tree, leaves first, root last. Raises ValueError without leaves."""
    levels = [list(leaves)]
    if not levels[0]:
        raise ValueError("a tree has at least one leaf")
    while len(levels[-1]) > 1:
        below = levels[-1]
        above = [digest(_NODE, *below[at : at + 2]) for at in range(0, len(below) - 1, 2)]
        levels.append(above + below[len(below) & ~1 :])
    return levels


def path_of(levels: Sequence[Sequence[Digest]], first: int, count: int) -> bytes:
    """The digests that prove `count` leaves from `first`: neighbours from the bottom up, left before right."""
    start, stop, path = first, first + count, b""
    for level in levels[:-1]:
        if start & 1:
            path += level[start - 1]
        if stop & 1 and stop < len(level):
            path += level[stop]
        start, stop = start >> 1, (stop + 1) >> 1
    return path


def path_digests(total: int, first: int, count: int) -> int:
    """How many digests `path_of` gives for `count` leaves from `first` of a tree of `total` leaves."""
    start, stop, width, found = first, first + count, total, 0
    while width > 1:
        found += (start & 1) + (stop & 1 and stop < width)
        start, stop, width = start >> 1, (stop + 1) >> 1, (width + 1) >> 1
    return found


class MerklePart:
    """The part of a tree that follows from neighbouring leaves and their path."""

    def __init__(self, total: int, first: int, leaves: Sequence[Digest], path: bytes) -> None:
        """Raises DecodeError unless `path` has the length that leaves `first` … of `total` need."""
        if not 0 <= first < first + len(leaves) <= total or len(path) % DIGEST_BYTES:
            raise DecodeError("merkle: leaves outside the tree, or a path of broken digests")
        given = iter([Digest(path[at : at + DIGEST_BYTES]) for at in range(0, len(path), DIGEST_BYTES)])
        self._rows: list[tuple[int, list[Digest]]] = []
        start, row, width = first, list(leaves), total
        while width > 1:
            start, row = self._widened(start, row, width, given)
            row = [
                digest(_NODE, *row[at : at + 2]) if at + 1 < len(row) else row[at] for at in range(0, len(row), 2)
            ]
            start, width = start >> 1, (width + 1) >> 1
        if next(given, None) is not None:
            raise DecodeError("merkle: the path is too long")
        self.root = row[0]

    def path(self, first: int, count: int) -> bytes:
        """Path that proves `count` of the leaves from `first` alone."""
        path, start, stop = b"", first, first + count
        for known, row in self._rows:
            if start & 1:
                path += row[start - 1 - known]
            # Without a leaf beside it the last one moves up unchanged.
            if stop & 1 and stop - known < len(row):
                path += row[stop - known]
            start, stop = start >> 1, (stop + 1) >> 1
        return path

    def _widened(
        self, start: int, row: list[Digest], width: int, given: Iterator[Digest]
    ) -> tuple[int, list[Digest]]:
        """The row with the neighbours that its nodes above need."""
        left = start & 1
        right = (start + len(row)) & 1 and start + len(row) < width
        try:
            row = [next(given), *row] if left else row
            row = [*row, next(given)] if right else row
        except StopIteration:
            raise DecodeError("merkle: the path is too short") from None
        self._rows.append((start - left, row))
        return start - left, row


def check_path(root: Digest, total: int, first: int, leaves: Sequence[Digest], path: bytes) -> None:
    """Raise DecodeError unless `leaves` are leaves `first` … of the tree of `total` leaves that `root` names."""
    if MerklePart(total, first, leaves, path).root != root:
        raise DecodeError("merkle: the leaves are not in the tree")
