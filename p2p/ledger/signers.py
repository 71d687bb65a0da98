"""Who signed entries in a run's folder, in a file beside the ledger: where the ledger is lost, it says so.

An author is noted after its entry is on the disk, and before anybody receives it: after a kill in between nobody
has the entry. So who is not named may begin its feed anew. Of who is named others may have entries.
"""

import logging
from pathlib import Path

from atoll.p2p.system.atomic_files import read_whole, write_whole
from atoll.protocols.errors import DiskFault
from atoll.protocols.ids import PeerId

log = logging.getLogger(__name__)

SIGNERS_FILE = "signed"
"""File name below a run's folder."""
_MAX_BYTES = 1 << 16


class Signers:
    """The authors that signed entries in one folder."""

    def __init__(self, run_folder: Path) -> None:
        self._path = run_folder / SIGNERS_FILE
        self._known: frozenset[PeerId] | None = None

    def __contains__(self, author: PeerId) -> bool:
        """Whether `author` signed an entry here. Raises DiskFault, CorruptFault."""
        return author in self._read()

    def note(self, author: PeerId) -> None:
        """Note that `author` signs entries here, durably. A disk that refuses is only logged: the next entry, or
        start, notes it.
        """
        try:
            if author not in (known := self._read()):
                write_whole(self._path, "".join(f"{one}\n" for one in sorted({*known, author})).encode())
                self._known = known | {author}
        except DiskFault as fault:
            log.warning("this node would not know that its ledger is lost: %s", fault.line())

    def _read(self) -> frozenset[PeerId]:
        if self._known is None:
            data = read_whole(self._path, max_bytes=_MAX_BYTES) or b""
            self._known = frozenset(map(PeerId, data.decode("ascii", "replace").split()))
        return self._known
