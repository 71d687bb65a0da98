"""Turns of large calls: one at a time, peers in equal shares, and half of the event loop's time together.

A call of a few bytes may cost its handler milliseconds, and any peer may keep 64 of them in flight. If they ran
one after the other, pings would be answered late, and neighbours would hang up. The order is start-time fair
queuing (Goyal, Vin and Cheng, 1996): the tag of a request is the time that its peer's requests took so far, but at
least the tag of the newest turn; the lowest tag is next. A peer that asks seldom, or for little, waits for few.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

MOST_TURN_S = 0.25
"""A turn counts as no longer: what takes more is a disk or a machine that stood still, and no peer's fault."""


class Share:
    """What the requests of one peer took so far."""

    def __init__(self) -> None:
        self.used_s = 0.0


class CallTurns:
    """Gives turns to the requests of all peers. A peer takes part with one request at a time."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], tuple[float, int]] = {}
        self._numbers = itertools.count()
        self._tag_s = 0.0
        self._is_taken = False

    @asynccontextmanager
    async def turn(self, share: Share) -> AsyncIterator[None]:
        """Context manager: waits for a turn, and holds it. Safe to cancel.

        After it nobody has a turn for as long as it took: other tasks have the other half of the time.
        """
        loop = asyncio.get_running_loop()
        await self._enter(max(share.used_s, self._tag_s))
        began, tag_s = loop.time(), self._tag_s
        try:
            yield
        finally:
            took_s = min(loop.time() - began, MOST_TURN_S)
            share.used_s = tag_s + took_s
            loop.call_later(took_s, self._next)

    async def _enter(self, tag_s: float) -> None:
        if not self._is_taken:
            self._is_taken, self._tag_s = True, tag_s
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting[place] = tag_s, next(self._numbers)
        try:
            await place
        except asyncio.CancelledError:
            if self._waiting.pop(place, None) is None and not place.cancelled():
                self._next()  # it was this one's turn already
            raise

    def _next(self) -> None:
        self._is_taken = False
        while self._waiting and not self._is_taken:
            place = min(self._waiting, key=self._waiting.__getitem__)
            tag_s, _ = self._waiting.pop(place)
            if not place.done():  # else its task is cancelled, and has not run since
                self._is_taken, self._tag_s = True, tag_s
                place.set_result(None)
