"""Gets the payloads of others: fetches, verifies and holds them, again and again until they are not needed.

A payload is held when its bytes are on disk and the worker has verified them, since the start, against a record:
a blob of that name may be something else, or may have come just before a kill. Bytes that have the right hash but
do not fit the record are void: the record's author is blamed, and the record never gets a payload. A blob that is
legal for one record may be void for another: with another fragment, experts or rows, or as that of a Reduction.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.node.daemon.core.interfaces import BlobSource
from atoll.p2p.blobs.asking import holders_in_turn, pause_s
from atoll.p2p.blobs.turns import DownloadTurns, Line
from atoll.protocols.errors import AtollError, DecodeError, DiskFault
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.local.contribution_forms import PayloadRecord, rows_of, slice_of
from atoll.protocols.run.arena import Span

log = logging.getLogger(__name__)

ATTEMPT_S, FIRST_S = 120.0, 20.0
"""Of one attempt; of the first one for a stranger's payload, each later one twice as long: what came is kept."""
PARALLEL, OF_STRANGERS, OF_ONE_AUTHOR = 8, 4, 4
"""Downloads at a time; those of authors that no final set names; of one author, as many as a peer serves."""
SMALL_BYTES = 1 << 20
"""Up to this size few peers are asked, the author first: many holders cost more than they save."""

Key = tuple[Digest, int, bytes, tuple[Span, ...]]
"""Payload, legal size, root of the rows and slice. Experts change a payload by their number only."""


@dataclass(kw_only=True)
class PayloadFetcher:
    """Owns the downloads of payloads. One task per wanted payload, at most PARALLEL at work."""

    blobs: BlobSource
    size_of: Callable[[PayloadRecord], int]
    """Returns the one legal size of a payload in bytes."""
    verify: Callable[[Path, PayloadRecord], Awaitable[None]]
    """Raises DecodeError for bytes that do not fit the record."""
    start_task: Callable[[Coroutine[Any, Any, None], str], None]
    post: Callable[[Callable[[], None]], None]
    on_fault: Callable[[PeerId, AtollError], None]
    on_disk_fault: Callable[[DiskFault], None]
    bringer_of: Callable[[PeerId], PeerId | None] = lambda author: None
    """Returns the neighbour that brought an author, while many bring authors that showed no work; else None."""
    is_known: Callable[[PeerId], bool] = lambda author: True  # whether a final set names it, or there is none
    pushed: Callable[[Digest, int], Awaitable[Path | None]] | None = None  # see PushedBlobs.take
    waits: Callable[[Round], asyncio.Event | None] = lambda number: None  # until when its payloads are not fetched
    _listeners: list[Callable[[Digest], None]] = field(default_factory=list)
    _wanted: dict[Key, Round] = field(default_factory=dict)
    _queued: set[tuple[Key, bool]] = field(default_factory=set)  # with whether in the line of a stranger
    _void: dict[Key, Round] = field(default_factory=dict)
    _sound: set[Key] = field(default_factory=set)
    _fetched: set[Digest] = field(default_factory=set)
    _turns: DownloadTurns = field(default_factory=lambda: DownloadTurns(places=PARALLEL, strangers=OF_STRANGERS))
    _looks: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PARALLEL))

    def subscribe(self, listener: Callable[[Digest], None]) -> None:
        """Call `listener` with each wanted payload once it is held, or void. Listeners run in this order."""
        self._listeners.append(listener)

    def is_held(self, record: PayloadRecord) -> bool:
        """Return whether the record's payload can be folded now."""
        return self.blobs.has_blob(record.payload) and self._key(record) in self._sound

    def is_void(self, record: PayloadRecord) -> bool:
        """Return whether the payload was verified, and does not fit the record."""
        return self._key(record) in self._void

    def trust(self, record: PayloadRecord) -> None:
        """Skip the verification of a payload that this node's own worker made."""
        self._sound.add(self._key(record))

    def fetch(self, record: PayloadRecord, author: PeerId, until: int = -1) -> None:
        """Start getting a payload, unless it is hopeless. It is wanted until its round, and `until`, is final."""
        key = self._key(record)
        if key in self._void or self.is_held(record):
            return
        self._wanted[key] = Round(max(record.round, until, self._wanted.get(key, record.round)))
        # Once a set names the author it waits no longer behind strangers.
        queue = key, self._line_of(author).is_stranger
        if queue not in self._queued:
            self._queued.add(queue)
            self.start_task(self._fetch_until_held(record, author, queue), f"payload {record.payload.hex()[:8]}")

    def stop(self, record: PayloadRecord) -> None:
        """Stop getting one payload."""
        self._wanted.pop(self._key(record), None)

    def forget(self, final: Round) -> None:
        """Stop getting the payloads of rounds up to `final`."""
        self._wanted = {key: number for key, number in self._wanted.items() if number > final}
        self._void = {key: number for key, number in self._void.items() if number > final}
        self._sound = {key for key in self._sound if self.blobs.has_blob(key[0])}
        self._fetched = {payload for payload in self._fetched if self.blobs.has_blob(payload)}

    async def restore(self, record: PayloadRecord, author: PeerId) -> None:
        """Return when a payload that was held is whole: what the disk lost or damaged is fetched again."""
        attempt = 0
        while True:
            try:
                await self._load(record, author, attempt)
                return
            except DecodeError:
                self._drop(record.payload)
            except DiskFault as error:
                self.on_disk_fault(error)
            except (AtollError, TimeoutError) as error:
                log.debug("payload %s: %s", record.payload.hex()[:8], error)
            attempt += 1
            await asyncio.sleep(pause_s(attempt))

    async def _fetch_until_held(self, record: PayloadRecord, author: PeerId, queue: tuple[Key, bool]) -> None:
        attempt = 0
        while queue[0] in self._wanted and not await self._attempt(record, author, attempt):
            attempt += (later := self.waits(record.round)) is None
            await (later.wait() if later else asyncio.sleep(pause_s(attempt)))
        self._queued.discard(queue)

    async def _attempt(self, record: PayloadRecord, author: PeerId, attempt: int) -> bool:
        """Try once. Returns True when there is nothing left to do."""
        key = self._key(record)
        try:
            is_here = await self._is_here(record)
            async with self._looks if is_here else self._turns.turn(self._line_of(author)):
                if key not in self._wanted or self.waits(record.round):
                    return False
                await self._load(record, author, attempt)
        except DecodeError as error:
            self._refuse(record, author, error)
            return True
        except DiskFault as error:
            self.on_disk_fault(error)
            return False
        except (AtollError, TimeoutError) as error:
            log.debug("payload %s: %s", record.payload.hex()[:8], error)
            return False
        self._sound.add(key)
        if self._wanted.pop(key, None) is not None:
            self.post(lambda: self._notify(record.payload))
        return True

    def _refuse(self, record: PayloadRecord, author: PeerId, error: DecodeError) -> None:
        key, payload = self._key(record), record.payload
        if (wanted := self._wanted.pop(key, None)) is not None:
            self._void[key] = wanted
        if payload in self._fetched and not any(payload == sound[0] for sound in self._sound):
            self._drop(payload)  # else another record has the same payload
        self.on_fault(author, error)
        if wanted is not None:
            self.post(lambda: self._notify(payload))

    def _notify(self, payload: Digest) -> None:
        for listener in self._listeners:
            listener(payload)

    async def _load(self, record: PayloadRecord, author: PeerId, attempt: int) -> None:
        payload, size = record.payload, self.size_of(record)
        may_last = not self._line_of(author).is_stranger or self.blobs.has_blob(payload)
        async with asyncio.timeout(ATTEMPT_S if may_last else min(ATTEMPT_S, FIRST_S * 2 ** min(attempt, 9))):
            if not self.blobs.has_blob(payload):
                near, bringer, small = self.blobs.neighbours(), self.bringer_of(author), size <= SMALL_BYTES
                holders = holders_in_turn(author, near, attempt, bringer=bringer, is_small=small)
                await self.blobs.fetch_blob(payload, holders, size)
                self._fetched.add(payload)
            await self.verify(self.blobs.blob_path(payload), record)

    async def _is_here(self, record: PayloadRecord) -> bool:
        """Whether the payload is on disk; what a neighbour pushed is stored first."""
        if not (is_here := self.blobs.has_blob(record.payload)) and self.pushed:
            is_here = await self.pushed(record.payload, self.size_of(record)) is not None
            self._fetched |= {record.payload} if is_here else set()
        return is_here

    def _line_of(self, author: PeerId) -> Line:
        if (bringer := self.bringer_of(author)) is not None:
            return Line(bringer, is_stranger=True, most=1)
        return Line(author, is_stranger=not self.is_known(author), most=OF_ONE_AUTHOR)

    def _key(self, record: PayloadRecord) -> Key:
        return record.payload, self.size_of(record), rows_of(record), slice_of(record)

    def _drop(self, payload: Digest) -> None:
        try:
            self.blobs.delete_blob(payload)
        except DiskFault as error:
            self.on_disk_fault(error)
