"""Shuffles documents of tokens that do not fit into memory: each is dealt to one of many files, at random.

Later each file is read whole and shuffled in memory. That is a uniform shuffle in two passes over the disk (Rao,
"Randomization of mass data", 1961), and needs memory for one file.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.random import Generator
from numpy.typing import DTypeLike, NDArray

from atoll.p2p.system.atomic_files import disk

FILES = 64


class ShuffleFiles:
    """The documents of one source, in FILES files below a folder. Use it as a context manager while adding."""

    def __init__(self, folder: Path, kind: DTypeLike, rng: Generator) -> None:
        """Raises DiskFault."""
        self._paths = [folder / f"{number}.tokens" for number in range(FILES)]
        self._kind, self._rng = np.dtype(kind), rng
        self._sizes: list[list[int]] = [[] for _ in range(FILES)]
        """Tokens of each document, by file."""
        with disk(folder):
            folder.mkdir()
            self._files = [path.open("wb") for path in self._paths]

    def __enter__(self) -> "ShuffleFiles":
        return self

    def __exit__(self, *reason: object) -> None:
        for file in self._files:
            file.close()

    def add(self, tokens_N: NDArray[np.int32]) -> None:
        """Add one document, `[N]`. Raises DiskFault."""
        at = int(self._rng.integers(FILES))
        with disk(self._paths[at]):
            self._files[at].write(tokens_N.astype(self._kind).tobytes())
        self._sizes[at].append(len(tokens_N))

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return sum(map(sum, self._sizes))

    def draw(self, share: float) -> list[NDArray[np.bool_]]:
        """For each file which documents are drawn, if about `share` of all are."""
        return [self._rng.random(len(sizes)) < share for sizes in self._sizes]

    def count(self, drawn: list[NDArray[np.bool_]]) -> int:
        """Tokens of the drawn documents."""
        return sum(
            int(np.array(sizes, np.int64)[which].sum()) for sizes, which in zip(self._sizes, drawn, strict=True)
        )

    def read(self, at: int, drawn: NDArray[np.bool_]) -> Iterator[NDArray[np.generic]]:
        """The drawn documents of file `at`, each `[N]`. Raises DiskFault."""
        with disk(self._paths[at]):
            tokens_N = np.fromfile(self._paths[at], self._kind)
        ends = np.cumsum(self._sizes[at], dtype=np.int64)
        for end, size, is_drawn in zip(ends, self._sizes[at], drawn, strict=True):
            if is_drawn:
                yield tokens_N[end - size : end]
