"""The newest lines of the node's log and of its journal, in memory, for readers that come back for what is new."""

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from atoll.node.daemon.telemetry.logfile import LogTail, log_line
from atoll.node.daemon.web.page_data import PageEvent
from atoll.protocols.local.control_messages import LogLine

LINES = 200
"""Most lines of the log that are held."""
EVENTS = 50
"""Most events of the journal that are held."""
START_BYTES = 64 << 10
"""Where more is unread, it is read from so far before its end: about as many bytes as LINES lines have."""
MESSAGE_MAX = 2_000
"""Most characters of a message that are held: a traceback is longer."""
FACTS_MAX = 300
"""Most characters of the facts of an event that are held: one may name all members."""
ROUTINE = frozenset(("training", "trained", "kept", "closed", "slices", "audited"))
"""What happens in every round; `final` stands for them. Else the newest events would be of a few rounds only."""

Row = TypeVar("Row")
UnixSeconds: TypeAlias = Annotated[float, Meta(ge=0, lt=1e11)]
"""Times that a page can write as a date."""


class LineRing(Generic[Row]):
    """Reads what was appended to a file at each call, and holds the newest rows of it."""

    def __init__(self, path: Path, read: Callable[[bytes], Row | None], most: int) -> None:
        """`read` makes a row of a line, or None of one that is left out; at most `most` rows are held."""
        self._tail = LogTail(path, START_BYTES)
        self._read = read
        self._most = most
        self._rows: deque[Row] = deque(maxlen=most)
        self._count = 0
        """Rows that were ever held."""

    def news(self, after: int) -> tuple[int, Sequence[Row]]:
        """The count of rows so far, and those of the newest ones that came after the first `after`."""
        # Nobody asks while no page is open: what was written meanwhile is left out but for its end.
        tail = self._tail
        lines = tail.last_bytes(START_BYTES) if tail.unread_bytes > START_BYTES else tail.fresh_bytes()
        fresh = [row for row in map(self._read, lines) if row is not None][-self._most :]
        self._rows.extend(fresh)
        self._count += len(fresh)
        wanted = min(len(self._rows), self._count - after if after <= self._count else self._count)
        return self._count, tuple(self._rows)[len(self._rows) - wanted :]


def log_ring(path: Path) -> LineRing[LogLine]:
    """The newest LINES lines of a log."""

    def read(data: bytes) -> LogLine:
        line = log_line(data)
        return LogLine(line.time, line.level, line.logger, line.message[:MESSAGE_MAX])

    return LineRing(path, read, LINES)


def event_ring(path: Path) -> LineRing[PageEvent]:
    """The newest EVENTS events of a journal (round_log.py) that are not ROUTINE."""
    return LineRing(path, _event, EVENTS)


def _event(data: bytes) -> PageEvent | None:
    """None for a line that is no event: the power may have cut it."""
    try:
        facts = msgspec.json.decode(data, type=dict[str, Any])
        unix_s, name = msgspec.convert((facts.pop("time"), facts.pop("event")), tuple[UnixSeconds, str])
    except (msgspec.MsgspecError, UnicodeError, KeyError):
        return None
    text = " ".join(f"{key}={value}" for key, value in facts.items())
    return None if name in ROUTINE else PageEvent(unix_s, name[:FACTS_MAX], text[:FACTS_MAX])
