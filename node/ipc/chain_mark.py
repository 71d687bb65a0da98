"""The mark by which the daemon tells the next worker that its state belongs to a chain that the node leaves."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from atoll.p2p.system.atomic_files import disk, read_whole, sync_folder, write_whole
from atoll.protocols.errors import CorruptFault, DiskFault
from atoll.protocols.ids import Round

ASIDE = "state-aside"
"""Folder of the newest state whose chain this node left."""
MARK = "leaving-chain"
"""Name of the file, in the run's folder. The daemon writes it."""
TAKEN = "leaving-chain.taken"
"""A mark that a worker took away and may not have obeyed. Only workers write it, and one lives at a time."""
_MAX_BYTES = 32


@dataclass(frozen=True, slots=True)
class ChainMark:
    """The mark in the folder of a run."""

    folder: Path

    def first(self) -> int | None:
        """The first round that another chain decides; None without a mark. Raises DiskFault, CorruptFault."""
        found = [first for name in (MARK, TAKEN) if (first := _read(self.folder / name)) is not None]
        return min(found, default=None)

    def keeps(self, newest: int | None) -> Round | None:
        """The round of the model that a worker will have that obeys the mark; None without a mark.

        -1: none, for it is of the chain that is left, or nobody knows. `newest`: of its state, if that is known.
        """
        try:
            first = self.first()
        except (DiskFault, CorruptFault):  # the worker says so
            first = 0
        if first is None:
            return None
        return Round(-1 if newest is None or newest >= first else newest)

    def put(self, first: int) -> int | None:
        """Write durably that the state in this folder must not go on from round `first` on.

        Returns what the mark said before, to a worker that has not read it yet. Raises DiskFault, CorruptFault.
        """
        before, newest = self.first(), _read(self.folder / MARK)
        # Beside what a worker took, which it may have obeyed already: a copy of that would be obeyed twice.
        self._write(first if newest is None else min(first, newest))
        return before

    def put_back(self, before: int | None) -> None:
        """Let it say what it said before this node tried to leave, and could not. Raises DiskFault."""
        if before is not None:
            self._write(before)
        with disk(self.folder):
            for name in (MARK,) * (before is None) + (TAKEN,):
                (self.folder / name).unlink(missing_ok=True)
        sync_folder(self.folder)

    def remove(self, obeyed: int) -> None:
        """A worker obeyed it from round `obeyed` on. One that names an earlier round stays: it came meanwhile.

        Raises DiskFault, CorruptFault.
        """
        taken = self.folder / TAKEN
        with disk(self.folder):
            taken.unlink(missing_ok=True)
            # Read under a name of its own: the daemon may write the mark between a look at it and its end.
            with suppress(FileNotFoundError):
                os.rename(self.folder / MARK, taken)
        newest = _read(taken)
        if newest is not None and newest >= obeyed:
            with disk(self.folder):
                taken.unlink(missing_ok=True)
        sync_folder(self.folder)

    def _write(self, first: int) -> None:
        write_whole(self.folder / MARK, b"%d\n" % first)


def news_of(run_folder: Path, first: int) -> str:
    """The line by which the user learns that this node leaves its chain at round `first`."""
    return (
        f"this node joins the others' model from round {first} on; its own work returns through its error "
        f"feedback. A model that it has of round {first} or later goes to {run_folder / ASIDE}"
    )


def _read(path: Path) -> int | None:
    try:
        data = read_whole(path, max_bytes=_MAX_BYTES)
    except CorruptFault:
        data = b"-"  # too long. Without the mark the state would go on in the chain that was left
    if data is None:
        return None
    data = data.strip()
    if data and not data.isdigit():
        raise CorruptFault(f"{path} does not hold a number", hint="write the number 0 into it")
    return int(data or b"0")
