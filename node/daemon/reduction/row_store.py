"""Rows of others' payloads on disk: one file for each contribution and slice, as they are served."""

from collections.abc import Collection
from pathlib import Path

from atoll.p2p.system.atomic_files import disk, make_folder, write_whole
from atoll.protocols.ids import Digest
from atoll.protocols.run.arena import Span

_SUFFIX = ".rows"


class RowStore:
    """Encoded RowsAnswers by entry id and span. Every method may raise DiskFault."""

    def __init__(self, folder: Path) -> None:
        """Open or create; files of other names are left alone."""
        self._folder = make_folder(folder)
        self._known: set[tuple[Digest, Span]] = set()
        with disk(folder):
            names = [path.name.removesuffix(_SUFFIX) for path in folder.glob(f"*{_SUFFIX}")]
        self._known.update(found for name in names if (found := _read_name(name)) is not None)

    def has(self, entry: Digest, span: Span) -> bool:
        """Whether these rows are here."""
        return (entry, span) in self._known

    def path(self, entry: Digest, span: Span) -> Path:
        """Where they lie, or would."""
        return self._folder / f"{entry.hex()}-{span.start}-{span.stop}{_SUFFIX}"

    def put(self, entry: Digest, span: Span, answer: bytes) -> None:
        """Keep rows that were verified."""
        write_whole(self.path(entry, span), answer)
        self._known.add((entry, span))

    def drop(self, entry: Digest, span: Span) -> None:
        """Forget rows: they rotted, or nobody needs them."""
        self._known.discard((entry, span))
        path = self.path(entry, span)
        with disk(path):
            path.unlink(missing_ok=True)

    def keep_only(self, entries: Collection[Digest]) -> None:
        """Forget the rows of all other contributions."""
        for entry, span in [one for one in self._known if one[0] not in entries]:
            self.drop(entry, span)


def _read_name(name: str) -> tuple[Digest, Span] | None:
    try:
        entry, start, stop = name.split("-")
        return Digest(bytes.fromhex(entry)), Span(int(start), int(stop))
    except ValueError:
        return None
