"""Turns of large calls: one at a time, members first, peers in equal shares, half of the loop's time together.

A call of a few bytes may cost its handler milliseconds, and any peer may keep 64 of them in flight. If they ran
one after the other, pings would be answered late, and neighbours would hang up. The order is start-time fair
queuing (Goyal, Vin and Cheng, 1996): the tag of a request is the time that its peer's requests took so far, but at
least the tag of the newest turn; the lowest tag is next. A peer that asks seldom, or for little, waits for few.

Identities cost nothing, so strangers (peers that no final set names) wait in a queue of their own. It has at most
a quarter of the loop's time and BURST_S, and beside members that wait a quarter of the turns' time.
"""

import asyncio
import itertools
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

MOST_TURN_S = 0.25
"""A turn counts as no longer: what takes more is a disk or a machine that stood still, and no peer's fault."""
OTHERS_SHARE = 3
"""For each turn of a stranger so many times its length is not strangers', and members that wait have as much."""
BURST_S = 0.5
"""Seconds of turns that strangers have without longer pauses, after four times as long without any: a newcomer
that catches up has half of the loop's time. All strangers share it, so new names have no more of it."""


class Share:
    """What the requests of one peer took so far."""

    def __init__(self) -> None:
        self.used_s = 0.0
        self.is_stranger = True


class _Queue:
    """Requests that wait, with their tags, and the tag of the newest turn."""

    def __init__(self) -> None:
        self.waiting: dict[asyncio.Future[None], tuple[float, int]] = {}
        self.tag_s = 0.0


class CallTurns:
    """Gives turns to the requests of all peers. A peer takes part with one request at a time."""

    def __init__(self) -> None:
        self._members = _Queue()
        self._strangers = _Queue()
        self._numbers = itertools.count()
        self._is_taken = False
        self._strangers_rest = False
        self._even_s = -math.inf
        """When strangers will have had exactly their share of the loop's time; never long ago."""
        self._owed_s = 0.0
        """Time of turns that members who wait have before the next stranger."""

    @asynccontextmanager
    async def turn(self, share: Share, *, is_stranger: bool = False) -> AsyncIterator[None]:
        """Context manager: waits for a turn, and holds it. Safe to cancel.

        After it nobody has a turn for as long as it took: other tasks have the other half of the time.
        """
        loop = asyncio.get_running_loop()
        if share.is_stranger != is_stranger:  # the time of the other queue says nothing in this one
            share.used_s, share.is_stranger = 0.0, is_stranger
        queue = self._strangers if is_stranger else self._members
        await self._enter(queue, max(share.used_s, queue.tag_s))
        began, tag_s = loop.time(), queue.tag_s
        try:
            yield
        finally:
            took_s = min(loop.time() - began, MOST_TURN_S)
            share.used_s = tag_s + took_s
            self._charge(took_s, is_stranger=is_stranger)
            loop.call_later(took_s, self._next)

    def _charge(self, took_s: float, *, is_stranger: bool) -> None:
        if not is_stranger:
            self._owed_s -= took_s
            return
        self._owed_s = OTHERS_SHARE * took_s
        loop, whole = asyncio.get_running_loop(), 1 + OTHERS_SHARE
        # A token bucket, kept as the time at which it is even ("virtual scheduling" of ATM's GCRA, ITU-T I.371).
        self._even_s = max(self._even_s, loop.time() - took_s - whole * BURST_S) + whole * took_s
        if self._even_s > loop.time():
            self._strangers_rest = True
            loop.call_at(self._even_s, self._end_rest)

    def _end_rest(self) -> None:
        self._strangers_rest = False
        self._begin()

    async def _enter(self, queue: _Queue, tag_s: float) -> None:
        place = asyncio.get_running_loop().create_future()
        queue.waiting[place] = tag_s, next(self._numbers)
        self._begin()
        try:
            await place
        except asyncio.CancelledError:
            if queue.waiting.pop(place, None) is None and not place.cancelled():
                self._next()  # it was this one's turn already
            raise

    def _next(self) -> None:
        self._is_taken = False
        self._begin()

    def _begin(self) -> None:
        while not self._is_taken and (queue := self._choose()) is not None:
            place = min(queue.waiting, key=queue.waiting.__getitem__)
            tag_s, _ = queue.waiting.pop(place)
            if not place.done():  # else its task is cancelled, and has not run since
                self._is_taken, queue.tag_s = True, tag_s
                place.set_result(None)

    def _choose(self) -> _Queue | None:
        """Members first, until they had what they are owed; nobody may wait."""
        if self._members.waiting and (self._strangers_rest or self._owed_s > 0 or not self._strangers.waiting):
            return self._members
        return self._strangers if self._strangers.waiting and not self._strangers_rest else None
