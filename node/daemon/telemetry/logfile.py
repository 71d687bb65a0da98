"""Writes the node's log and its journal to disk as rotated JSON lines, and reads back their tails."""

import contextlib
import json
import logging
import logging.handlers
import os
from collections import Counter
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

import msgspec

from atoll.p2p.system.atomic_files import disk
from atoll.protocols.local.control_messages import LogLine

ROTATE_BYTES = 5_000_000
KEEP_FILES = 3
TAIL_MAX_BYTES = 4_000_000
"""Most bytes that one request of the control socket reads from the end of the file."""
JOURNAL_BYTES = 16 << 20
"""A longer journal becomes `events.1.jsonl`, which replaces the previous one."""
LINES_OF_ONE, LINES_OF_ALL = 8, 64
"""Lines an hour about the faults of one author, and of all together; the others are counted in one line."""

_decoder = msgspec.json.Decoder(LogLine)


class JsonLines(logging.Formatter):
    """Formats a record as one line with a JSON object that decodes as LogLine."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record; its traceback becomes part of the message."""
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        return json.dumps(
            {"time": time, "level": record.levelname.lower(), "logger": record.name, "message": message}
        )


class _PrivateFiles(logging.handlers.RotatingFileHandler):
    """Opens log files that only their owner may read."""

    def _open(self) -> TextIOWrapper:
        return TextIOWrapper(open(self.baseFilename, "ab", opener=_private), encoding="utf-8")

    def shouldRollover(self, record: logging.LogRecord) -> bool:
        """Whether the file is full; opens a new one where somebody deleted or moved it, as logrotate does."""
        if self.stream and not os.path.exists(self.baseFilename):
            gone, self.stream = self.stream, None
            gone.close()
        return bool(super().shouldRollover(record))

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the line: a full disk must neither stop the node nor fill its stderr with tracebacks."""


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def log_handler(path: Path) -> logging.Handler:
    """A handler that writes `path` and keeps KEEP_FILES older files. Raises DiskFault."""
    with disk(path):
        handler = _PrivateFiles(path, maxBytes=ROTATE_BYTES, backupCount=KEEP_FILES, encoding="utf-8")
    handler.setFormatter(JsonLines())
    return handler


class Journal:
    """A file of lines that begins again when it is long, and where somebody deleted or moved it."""

    def __init__(self, path: Path) -> None:
        """Raises DiskFault."""
        self.path = path
        self.is_ending = False
        """The node ends: what it writes from now on stays in one file, for who asks how it ended."""
        with disk(path):
            self._bytes = path.stat().st_size if path.exists() else 0
            self._set_aside()
            self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, line: str) -> bool:
        """Append a line. False: a full disk refuses it, and may lose it. Others report the disk."""
        with contextlib.suppress(OSError):
            if not self._file.closed and (self._set_aside() or not self.path.exists()):
                gone, self._file, self._bytes = self._file, self.path.open("a", encoding="utf-8"), 0
                gone.close()
            self._bytes += len(line) + 1
            self._file.write(line + "\n")
            self._file.flush()
            return True
        return False

    def close(self) -> None:
        """Write what was refused before, if the disk takes it. Raises OSError."""
        self._file.close()

    def _set_aside(self) -> bool:
        """Give a long file its other name: a kill leaves the one or the other. Returns whether it did."""
        if self._bytes <= JOURNAL_BYTES or self.is_ending or not self.path.exists():
            return False
        self._bytes = 0
        try:
            self.path.replace(self.path.with_name(f"{self.path.stem}.1{self.path.suffix}"))
        except OSError:
            return False  # the long file goes on, and the next try comes when it is twice as long
        return True


class FewLines:
    """Which lines about the faults of others are written: anybody can sign any number of these."""

    def __init__(self) -> None:
        self._hour = -1
        self._lines = Counter[str]()
        self._left_out = 0

    def takes(self, author: str) -> bool:
        """Whether one more line of this hour may be written; else it is counted."""
        # Nothing is remembered of authors beyond those of the lines.
        if self._lines.total() < LINES_OF_ALL and self._lines[author] < LINES_OF_ONE:
            self._lines[author] += 1
            return True
        self._left_out += 1
        return False

    def left_out(self, now_s: float, *, is_end: bool = False) -> int:
        """How many lines were left out in the hour that is over, once; 0 before it is."""
        if self._hour == (hour := int(now_s // 3600)) and not is_end:
            return 0
        left, self._left_out, self._hour = self._left_out, 0, hour
        self._lines.clear()
        return left


class LogTail:
    """Reads the end of a log that grows and is rotated during the reading."""

    def __init__(self, path: Path, most_bytes: int | None = None) -> None:
        """At most `most_bytes` are read by one call, else TAIL_MAX_BYTES."""
        self._path = path
        self._most_bytes = most_bytes or TAIL_MAX_BYTES
        self._file_id: int | None = None
        self._at = 0
        """Bytes of the file that were read."""
        self._part = b""
        """Start of a line whose end is not written yet."""

    @property
    def unread_bytes(self) -> int:
        """Bytes of the file that were not read; all of them where another file took its place."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return 0
        return max(0, status.st_size - (self._at if self._file_id == status.st_ino else 0))

    def last(self, lines: int) -> tuple[LogLine, ...]:
        """The newest `lines` lines; `fresh` continues after them."""
        return tuple(map(log_line, self.last_bytes(lines)))

    def fresh(self) -> tuple[LogLine, ...]:
        """Whole lines that were written since the last call."""
        return tuple(map(log_line, self.fresh_bytes()))

    def last_bytes(self, lines: int) -> list[bytes]:
        """The same as `last`, for files of other lines."""
        try:
            self._at = max(0, self._path.stat().st_size - self._most_bytes)
        except FileNotFoundError:
            return []
        skipped = self._at > 0
        self._file_id = self._path.stat().st_ino
        found = self.fresh_bytes()
        return found[1 if skipped else 0 :][-lines:] if lines else []

    def fresh_bytes(self) -> list[bytes]:
        """The same as `fresh`, for files of other lines."""
        try:
            with self._path.open("rb") as file:
                status, rest = os.fstat(file.fileno()), b""
                if self._file_id not in (None, status.st_ino) or status.st_size < self._at:
                    rest, self._at, self._part = self._rest(), 0, b""
                self._file_id = status.st_ino
                file.seek(self._at)
                data = file.read(self._most_bytes)
        except FileNotFoundError:
            return []
        self._at += len(data)
        *whole, self._part = (rest + self._part + data).split(b"\n")
        return [one for one in whole if one]

    def _rest(self) -> bytes:
        """What was not read of the file before, if that was rotated since; ends with a line."""
        for name in (f"{self._path.name}.1", f"{self._path.stem}.1{self._path.suffix}"):
            with contextlib.suppress(FileNotFoundError), self._path.with_name(name).open("rb") as file:
                if os.fstat(file.fileno()).st_ino == self._file_id:
                    file.seek(self._at)
                    return self._part + file.read(self._most_bytes).rpartition(b"\n")[0] + b"\n"
        return b""


def log_line(data: bytes) -> LogLine:
    """A line of the log; one that is none becomes its message."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeError):
        return LogLine("", "", "", data.decode(errors="replace"))
