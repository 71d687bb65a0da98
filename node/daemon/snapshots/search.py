"""Downloads offered snapshots until one is here. Which ones, `offers.py` and `turns.py` decide."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from atoll.node.daemon.snapshots.offers import OfferBook, OfferedSnapshot, Trust
from atoll.node.daemon.snapshots.turns import Running, gives_way, may_begin
from atoll.protocols.errors import DiskFault, PeerFault, Unreachable
from atoll.protocols.ids import Digest, PeerId, Round

SNAPSHOT_S = 3600.0
"""Deadline of one snapshot download."""
PARTS_MOST = 4
"""Unfinished downloads that stay on disk beside those that go on; of more, the shortest is deleted."""


class SnapshotSource(Protocol):
    """What a search needs of the swarm."""

    def neighbours(self) -> list[PeerId]:
        """Return the connected peers."""

    def fetched_bytes(self, blob: Digest) -> int:
        """Return how many bytes of a blob that is being fetched are on disk."""

    async def fetch_blob(self, blob: Digest, holders: list[PeerId], max_bytes: int) -> Path:
        """Download and verify a blob. Raises Unreachable, PeerFault or DiskFault."""


@dataclass(frozen=True, slots=True)
class FoundSnapshot:
    """A blob that is here, and has still to be checked against its state."""

    offer: OfferedSnapshot
    path: Path


@dataclass(slots=True)
class _Attempt:
    offer: OfferedSnapshot
    began_s: float
    had_bytes: int
    """What earlier attempts left."""
    end: asyncio.Timeout | None = None
    """Of the task, once it runs."""
    has_bytes: int = 0
    is_over: bool = False
    gave_way: bool = False


@dataclass(kw_only=True)
class SnapshotSearch:
    """The downloads of one node. Nothing here blocks but the tasks that it starts."""

    net: SnapshotSource
    max_bytes: int
    """Legal size of a snapshot, from the RunSpec."""
    now: Callable[[], float]
    start_task: Callable[[Coroutine[Any, Any, None], str], None]
    on_begin: Callable[[OfferedSnapshot], None]
    on_failure: Callable[[OfferedSnapshot, Exception], Awaitable[None]]
    on_end: Callable[[], None]
    """Called when a download is over, however it ended."""
    delete: Callable[[Digest], None]
    book: OfferBook = field(default_factory=OfferBook)
    _attempts: dict[Digest, _Attempt] = field(default_factory=dict)
    _found: dict[Digest, FoundSnapshot] = field(default_factory=dict)
    _begun: dict[Digest, tuple[Round, int]] = field(default_factory=dict)
    """Round and bytes on disk of what was begun and not adopted, Θ₀ apart."""

    def step(self, waiting: Sequence[OfferedSnapshot], is_wanted: Callable[[OfferedSnapshot], bool]) -> None:
        """Begin and end downloads. `waiting`: what may be tried, the best first."""
        now = self.now()
        for attempt in self._attempts.values():
            if not is_wanted(attempt.offer):
                _stop(attempt)
        self._found = {blob: found for blob, found in self._found.items() if is_wanted(found.offer)}
        new = [one for one in waiting if one.blob not in self._attempts and one.blob not in self._found]
        running, is_awaited = self._running(now), any(one.trust != Trust.START for one in new)
        for attempt, seen in running:
            if gives_way(seen, [other for _, other in running], is_awaited=is_awaited):
                attempt.gave_way = True
                _stop(attempt)
        for one in new:
            if may_begin(one.trust, [seen for _, seen in self._running(now)]):
                self._begin(one, now)

    def newest(self) -> FoundSnapshot | None:
        """Return the newest that is here; it stays until `take`."""
        return max(self._found.values(), key=lambda found: found.offer.round, default=None)

    def take(self, found: FoundSnapshot) -> None:
        """Who takes it checks it, and tells `book` what it was."""
        del self._found[found.offer.blob]

    def under_way(self) -> list[OfferedSnapshot]:
        """Return what is downloaded now."""
        return [attempt.offer for attempt in self._attempts.values() if not attempt.is_over]

    def forget(self, up_to: Round, kept: Collection[Digest]) -> None:
        """Delete what came of rounds up to this one, which nobody needs any more."""
        for blob, (number, _) in list(self._begun.items()):
            if number <= up_to and blob not in self._attempts:
                del self._begun[blob]
                if blob not in kept:
                    self.delete(blob)

    def _running(self, now: float) -> list[tuple[_Attempt, Running]]:
        return [(attempt, self._look(attempt, now)) for attempt in self._attempts.values() if not attempt.is_over]

    def _look(self, attempt: _Attempt, now: float) -> Running:
        attempt.has_bytes = max(attempt.has_bytes, self.net.fetched_bytes(attempt.offer.blob))
        return Running(
            trust=attempt.offer.trust,
            age_s=now - attempt.began_s,
            moved_bytes=max(0, attempt.has_bytes - attempt.had_bytes),
            left_bytes=self.max_bytes - attempt.has_bytes,
            failures=self.book.failures(attempt.offer),
        )

    def _begin(self, one: OfferedSnapshot, now: float) -> None:
        attempt = _Attempt(one, now, had_bytes=self._begun.get(one.blob, (one.round, 0))[1])
        self._attempts[one.blob] = attempt
        if one.trust != Trust.START:
            self._begun.setdefault(one.blob, (one.round, 0))
            self._drop_parts()
        self.on_begin(one)
        self.start_task(self._run(attempt), f"snapshot {one.round}")

    def _drop_parts(self) -> None:
        """Delete the shortest unfinished ones. What liars sent must not fill the disk."""
        idle = [blob for blob in self._begun if blob not in self._attempts and blob not in self._found]
        for blob in sorted(idle, key=lambda blob: -self._begun[blob][1])[PARTS_MOST:]:
            del self._begun[blob]
            self.delete(blob)

    async def _run(self, attempt: _Attempt) -> None:
        blob = attempt.offer.blob
        try:
            if attempt.is_over:
                return
            async with asyncio.timeout(SNAPSHOT_S) as attempt.end:
                # The first may lie: any other peer that offers the same, or is connected, does as well.
                holders = list(dict.fromkeys((*attempt.offer.peers, *self.net.neighbours())))
                path = await self.net.fetch_blob(blob, holders, self.max_bytes)
        except (DiskFault, Unreachable, PeerFault, TimeoutError) as error:
            is_counted, attempt.is_over = attempt.gave_way or not attempt.is_over, True
            if is_counted:
                await self._fail(attempt, error)
        else:
            self._found[blob] = FoundSnapshot(attempt.offer, path)
        finally:
            del self._attempts[blob]
            if blob in self._begun:
                self._begun[blob] = (attempt.offer.round, attempt.has_bytes)
        self.on_end()

    async def _fail(self, attempt: _Attempt, error: Exception) -> None:
        one, now = attempt.offer, self.now()
        self.book.add(one, error, now, is_isolated=not self.net.neighbours())
        if attempt.gave_way:
            error = Unreachable(f"nothing in {now - attempt.began_s:.0f} s, or less than from others")
        await self.on_failure(one, error)


def _stop(attempt: _Attempt) -> None:
    """End a download; its task sees it as a deadline."""
    if not attempt.is_over:
        attempt.is_over = True
        if attempt.end is not None:
            attempt.end.reschedule(asyncio.get_running_loop().time())
