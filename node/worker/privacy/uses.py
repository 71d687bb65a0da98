"""Counts how often steps used each window of this node's data, which is what its ε follows from (docs/privacy.md).

The file is never behind: before a round all uses that it may make are in it. A kill therefore leaves uses that
were not made, and a round that is trained again counts again, because its noise is another one.

A window that is m times in one step counts m²: it can move the sum by m·C, which is what m² steps do together.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from atoll.node.learning.data.dataset import RunText
from atoll.p2p.system.atomic_files import read_whole, write_whole
from atoll.protocols import codec
from atoll.protocols.errors import CorruptFault, DecodeError, PrivacySpent
from atoll.protocols.ids import DIGEST_BYTES, Digest, digest
from atoll.protocols.run.sections.privacy import PrivacySpec, epsilon

FILE = "privacy.uses"
_MAX_WINDOWS = 1 << 28
_COUNT = np.dtype("<u8")
_MAX_BYTES = _MAX_WINDOWS * _COUNT.itemsize + 256
_HINT = "restore it from a copy of this home; without it nobody knows how much this node's data were used"


class SavedUses(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The file, after 32 bytes of BLAKE3 of it."""

    version: Annotated[int, Meta(ge=1, le=1)]
    text: Digest
    """`RunText.digest`."""
    uses: bytes
    """Of each window, u64, little endian."""


class WindowUses:
    """Uses of each window of one text, by steps of this node."""

    def __init__(self, path: Path, text: Digest, windows: int) -> None:
        """Read the file; none where there is none. Raises CorruptFault, DiskFault.

        Of another text each window begins with the most uses of the old one: it may have the same sequences.
        """
        self._path, self._text = path, text
        saved = read_uses(path)
        self.is_new = saved is None
        self._uses_W = np.zeros(windows, np.uint64)
        if saved is not None:
            found_W = np.frombuffer(saved.uses, _COUNT)
            is_same = saved.text == text and len(found_W) == windows
            self._uses_W += found_W if is_same else found_W.max(initial=0)

    @property
    def most(self) -> int:
        """Of the window that was used most."""
        return int(self._uses_W.max(initial=0))

    def planned(self, steps: Iterable[NDArray[np.int64]]) -> NDArray[np.uint64]:
        """Uses of each window `[W]`, uint64, if these steps are taken: int64 windows `[B]` of each."""
        uses_W = self._uses_W.copy()
        for window_B in steps:
            _add(uses_W, window_B)
        return uses_W

    def write(self, uses_W: NDArray[np.uint64]) -> None:
        """Put these uses on the disk: none that is made from now on may be beyond them. Raises DiskFault."""
        write_whole(self._path, encode_uses(SavedUses(1, self._text, uses_W.astype(_COUNT).tobytes())))

    def use(self, window_B: NDArray[np.int64]) -> None:
        """A step uses these windows."""
        _add(self._uses_W, window_B)


class PrivacyAccount:
    """The uses of a run's data, and the largest ε that they may come to."""

    def __init__(self, agreed: PrivacySpec, home: Path, data: RunText) -> None:
        """Raises CorruptFault, DiskFault."""
        self._agreed = agreed
        self._path = home / FILE
        self.uses = WindowUses(self._path, data.digest, data.num_windows)

    def check(self, steps_taken: int) -> None:
        """Raise CorruptFault where steps were taken before, and nothing says on what."""
        if steps_taken and self.uses.is_new:
            raise CorruptFault(f"{self._path} is gone", hint=_HINT)

    def begin_round(self, steps: Iterable[NDArray[np.int64]]) -> None:
        """Write down what a round will use at most. Raises PrivacySpent before that, and DiskFault."""
        agreed, uses_W = self._agreed, self.uses.planned(steps)
        found = epsilon(int(uses_W.max(initial=0)), agreed.noise, agreed.delta)
        if agreed.most is not msgspec.UNSET and found > agreed.most:
            raise PrivacySpent(
                f"privacy: the next round would take ε to {found:.3g}, beyond the {agreed.most:g} of the run",
                hint="this node trains no more, and goes on serving the run",
            )
        self.uses.write(uses_W)


def read_uses(path: Path) -> SavedUses | None:
    """The content of the file; None where there is none. Raises CorruptFault, DiskFault."""
    data = read_whole(path, max_bytes=_MAX_BYTES)
    if data is None:
        return None
    try:
        found = codec.decode(data[DIGEST_BYTES:], SavedUses, max_bytes=_MAX_BYTES)
    except DecodeError as error:
        raise CorruptFault(f"{path} does not verify", hint=_HINT) from error
    if digest(data[DIGEST_BYTES:]) != data[:DIGEST_BYTES] or len(found.uses) % _COUNT.itemsize:
        raise CorruptFault(f"{path} does not verify", hint=_HINT)
    return found


def encode_uses(saved: SavedUses) -> bytes:
    """Bytes of the file."""
    body = codec.encode(saved)
    return digest(body) + body


def _add(uses_W: NDArray[np.uint64], window_B: NDArray[np.int64]) -> None:
    at, times = np.unique(window_B, return_counts=True)
    uses_W[at] += (times * times).astype(np.uint64)
