"""The newest lines of the node's log, in memory, for readers that come back for what is new."""

from collections import deque
from collections.abc import Sequence
from pathlib import Path

from atoll.node.daemon.telemetry.logfile import LogTail
from atoll.protocols.local.control_messages import LogLine

LINES = 200
"""Most lines that are held."""
START_BYTES = 64 << 10
"""Where more is unread, it is read from so far before its end: about as many bytes as LINES lines have."""
MESSAGE_MAX = 2_000
"""Most characters of a message that are held: a traceback is longer."""


class LogRing:
    """Reads what was appended to the log at each call, and holds the newest LINES lines."""

    def __init__(self, path: Path) -> None:
        self._tail = LogTail(path, START_BYTES)
        self._lines: deque[LogLine] = deque(maxlen=LINES)
        self._count = 0
        """Lines that were ever held."""

    def news(self, after: int) -> tuple[int, Sequence[LogLine]]:
        """The count of lines so far, and those of the newest ones that came after the first `after`."""
        # Nobody asks while no page is open: what was written meanwhile is left out but for its end.
        fresh = self._tail.last(LINES) if self._tail.unread_bytes > START_BYTES else self._tail.fresh()
        self._lines.extend(
            LogLine(line.time, line.level, line.logger, line.message[:MESSAGE_MAX]) for line in fresh
        )
        self._count += len(fresh)
        wanted = min(len(self._lines), self._count - after if after <= self._count else self._count)
        return self._count, tuple(self._lines)[len(self._lines) - wanted :]
