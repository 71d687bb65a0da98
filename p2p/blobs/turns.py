"""Whose download begins next: neither those of authors that nobody knows hold all places, nor those that stall."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from atoll.p2p.limits.bounded_table import put_newest

MOST_REMEMBERED = 256
"""Lines whose last turn is remembered, and lines whose stall is."""
STALL_S = 20.0
"""A turn that brings nothing for so long, as long as a stranger's first one has, is a stall."""
RECENT_S = 600.0
"""For so many seconds after a stall, a line comes after those without one."""


class Line(NamedTuple):
    """Those that wait one behind the other: the downloads of one author, or of all whom one neighbour brings."""

    name: str
    is_stranger: bool
    """Whether no final set names who waits in it."""
    most: int
    """Of its downloads at a time."""


@dataclass(kw_only=True)
class DownloadTurns:
    """Gives places to lines, the one first whose last turn is longest ago."""

    places: int
    strangers: int
    """Places that lines of strangers have together at most."""
    _waiting: dict[Line, deque[asyncio.Future[None]]] = field(default_factory=dict)
    _at_work: Counter[Line] = field(default_factory=Counter)
    _served: dict[str, int] = field(default_factory=dict)
    """When each line had its last turn, the newest last."""
    _turns: int = 0
    _stalled: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """Until when each line comes later."""

    @asynccontextmanager
    async def turn(self, line: Line) -> AsyncIterator[None]:
        """Wait for a place, and hold it. A cancelled wait leaves the line; the caller owns the deadline.

        An exception after STALL_S counts as a stall of the line.
        """
        loop = asyncio.get_running_loop()
        mine = loop.create_future()
        self._waiting.setdefault(line, deque()).append(mine)
        self._begin()
        try:
            await mine
            began_s = loop.time()
            try:
                yield
            except Exception:
                if loop.time() - began_s >= STALL_S:
                    put_newest(self._stalled, line.name, loop.time() + RECENT_S, MOST_REMEMBERED)
                raise
        finally:
            if mine.cancelled():
                self._leave(line, mine)
            else:
                self._at_work -= Counter([line])
            self._begin()

    def _begin(self) -> None:
        while (line := self._next()) is not None:
            mine = self._waiting[line][0]
            self._leave(line, mine)
            if mine.done():  # cancelled, and about to leave
                continue
            self._at_work[line] += 1
            self._turns += 1
            self._served.pop(line.name, None)
            self._served[line.name] = self._turns
            if len(self._served) > MOST_REMEMBERED:
                del self._served[next(iter(self._served))]
            mine.set_result(None)

    def _next(self) -> Line | None:
        if self._at_work.total() >= self.places:
            return None
        new = sum(many for line, many in self._at_work.items() if line.is_stranger)
        late = sum(many for line, many in self._at_work.items() if line.is_stranger or self._has_stalled(line))
        free = (
            line
            for line in self._waiting
            if self._at_work[line] < line.most
            and (not line.is_stranger or new < self.strangers)
            # One place stays for members that did not stall: else each waits for the end of another's stall.
            and (late < max(self.places - 1, 1) or not (line.is_stranger or self._has_stalled(line)))
        )
        # Those that sets name come first, but for one place: else nobody would ever become one of them.
        return min(
            free,
            key=lambda line: (
                line.is_stranger == (new > 0),
                self._has_stalled(line),
                self._served.get(line.name, 0),
            ),
            default=None,
        )

    def _has_stalled(self, line: Line) -> bool:
        return self._stalled.get(line.name, 0.0) > asyncio.get_running_loop().time()

    def _leave(self, line: Line, mine: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(line, deque())
        if mine in waiting:
            waiting.remove(mine)
        if not waiting:
            self._waiting.pop(line, None)
