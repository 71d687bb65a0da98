"""The rows of the round log: the newest ones are in memory, older ones are read from their file when asked for.

The file gets a line each time a row changes; a round's last line counts. A row in memory takes about a kilobyte,
one in the file a number of eight bytes: where its line begins.
"""

import contextlib
import os
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from atoll.p2p.system.atomic_files import write_whole
from atoll.protocols.errors import DiskFault
from atoll.protocols.ids import PeerId
from atoll.protocols.local.control_messages import RoundStatus

KEEP_ROWS = 10_000
"""Rounds, counted from the newest one, whose rows are known."""
HELD_ROWS = 128
"""Rows in memory."""
_LINE_BYTES = 4096
"""A line is read in parts of this size; most have one."""
_NOWHERE = -1

Kind = Literal["final", "closed", "trained", "validated"]
_IS: Mapping[Kind, Callable[[RoundStatus], bool]] = {
    "final": lambda row: row.final,
    "closed": lambda row: bool(row.digest),
    "trained": lambda row: row.payload_bytes > 0,
    "validated": lambda row: row.val_bpb is not None,
}


class RoundRows(Mapping[int, RoundStatus]):
    """Rows by round, rising. One that is not in memory is a copy: `open` gives the row that `save` writes."""

    def __init__(self, path: Path, peer: PeerId) -> None:
        """Read the file, or begin one. Raises OSError, DiskFault."""
        self._path, self._peer = path, peer
        self._held: dict[int, RoundStatus] = {}
        self._pinned: int | None = None
        self._members: tuple[PeerId, ...] = ()
        """What `share` gave last."""
        self._first = 0
        self._places = array("q")
        """Where the line of round `_first` + i begins in the file."""
        self._aside: dict[Kind, RoundStatus] = {}
        """The newest row of each kind that left the memory."""
        self._is_torn = False
        self._rewrite_if_long(path)
        self._file: BinaryIO = path.open("a+b", buffering=0)
        self._end = os.fstat(self._file.fileno()).st_size
        for number in list(self):
            if (row := self._read(number)) is not None:
                self._hold(row)

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._file.close()

    def __getitem__(self, number: int) -> RoundStatus:
        row = self._held.get(number) or self._read(number)
        if row is None:
            raise KeyError(number)
        return row

    def __iter__(self) -> Iterator[int]:
        there = (self._first + at for at, place in enumerate(self._places) if place != _NOWHERE)
        return iter(sorted({*there, *self._held}))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def held(self) -> list[RoundStatus]:
        """The rows in memory, the newest first."""
        return [self._held[number] for number in sorted(self._held, reverse=True)]

    def newest(self, kind: Kind) -> RoundStatus | None:
        """The row of the highest round that is of this kind."""
        found = next(filter(_IS[kind], self.held()), None)
        aside = self._aside.get(kind)
        return aside if found is None or (aside is not None and aside.round > found.round) else found

    def pin(self, number: int) -> None:
        """Keep the row of this round in memory until another one is pinned: it changes without being saved."""
        self._pinned = number

    def open(self, number: int) -> RoundStatus:
        """The row of a round, in memory and to be changed there; a new one if there is none."""
        row = self._held.get(number)
        if row is None:
            row = self._read(number) or RoundStatus(round=number, peer=self._peer)
            self._hold(row)
        return row

    def share(self, authors: Iterable[str]) -> tuple[PeerId, ...]:
        """Sorted; equal names of all rows are one object, and so are equal tuples of one row after the other."""
        names = tuple(PeerId(sys.intern(author)) for author in sorted(authors))
        self._members = self._members if names == self._members else names
        return self._members

    def save(self, row: RoundStatus) -> None:
        """Write the row's line. A full disk loses it: telemetry must not stop a node, others report the disk."""
        # What was written of a line that the disk cut off must not spoil this one.
        line = b"\n" * self._is_torn + _line(row)
        try:
            if not self._path.exists():
                self._write_again()
            written = self._file.write(line) or 0
        except (OSError, ValueError, DiskFault):  # ValueError: the log is closed
            written = 0
        if written == len(line):
            self._set_place(row.round, self._end + self._is_torn)
            self._is_torn = False
        elif written:
            self._is_torn = True
        self._end += written

    def _write_again(self) -> None:
        """Write the file that somebody deleted or moved: what it had can be read here until it is closed."""
        write_whole(self._path, os.pread(self._file.fileno(), self._end, 0))
        gone, self._file = self._file, self._path.open("a+b", buffering=0)
        gone.close()

    def _hold(self, row: RoundStatus) -> None:
        row.contributors = self.share(row.contributors)
        self._held[row.round] = row
        while len(self._held) > HELD_ROWS:
            oldest = self._held.pop(min(self._held.keys() - {row.round, self._pinned}))
            for kind, is_of in _IS.items():
                before = self._aside.get(kind)
                if before is not None and before.round > oldest.round:
                    continue
                if is_of(oldest):
                    self._aside[kind] = oldest
                elif before is not None and before.round == oldest.round:
                    del self._aside[kind]

    def _read(self, number: int) -> RoundStatus | None:
        at = number - self._first
        if not 0 <= at < len(self._places) or self._places[at] == _NOWHERE:
            return None
        line = b""
        try:
            while b"\n" not in line and (part := self._part(self._places[at] + len(line))):
                line += part
            row = msgspec.json.decode(line.partition(b"\n")[0], type=RoundStatus)
        except (OSError, ValueError):  # the file was changed by somebody else, or is closed
            return None
        return row if row.round == number else None

    def _part(self, at: int) -> bytes:
        return os.pread(self._file.fileno(), _LINE_BYTES, at)

    def _set_place(self, number: int, place: int) -> None:
        if not self._places:
            self._first = number
        if number < self._first:
            if self._first + len(self._places) - number > KEEP_ROWS:
                return  # too old
            self._places = array("q", [_NOWHERE] * (self._first - number)) + self._places
            self._first = number
        lacking = number - self._first - len(self._places) + 1
        if lacking > KEEP_ROWS:  # a leap: nothing of before is among the newest
            self._first, self._places, lacking = number, array("q"), 1
        self._places.extend([_NOWHERE] * lacking)
        self._places[number - self._first] = place
        if (gone := len(self._places) - KEEP_ROWS) > 0:
            del self._places[:gone]
            self._first += gone

    def _rewrite_if_long(self, path: Path) -> None:
        """Find the lines of a file. One that consists mostly of replaced rows is written anew."""
        if self._find_lines(path) <= 100 + 2 * len(self):
            return
        with path.open("rb") as self._file:
            rows = [row for number in self if (row := self._read(number)) is not None]
        with contextlib.suppress(DiskFault):
            write_whole(path, b"".join(map(_line, rows)))
        self._places = array("q")
        self._find_lines(path)

    def _find_lines(self, path: Path) -> int:
        """Note where each whole line begins; returns how many there are."""
        count, at = 0, 0
        if not path.exists():
            return count
        with path.open("rb") as file:
            for line in file:
                try:
                    self._set_place(msgspec.json.decode(line, type=RoundStatus).round, at)
                    count += 1
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    # The end of the file may be lost with the power.
                    pass
                at += len(line)
                self._is_torn = not line.endswith(b"\n")
        return count


def _line(row: RoundStatus) -> bytes:
    return msgspec.json.encode(row) + b"\n"
