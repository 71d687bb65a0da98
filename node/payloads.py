"""Getting the payloads of others: fetch, verify, hold; again and again until they are not needed.

A payload is held when its bytes are on disk and the worker decoded them. Bytes that verify by hash
but do not decode are void: their author is blamed and they are never held.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from atoll.protocols.errors import AtollError, DecodeError, DiskFault
from atoll.protocols.ids import Digest, PeerId, Round

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.3
LAST_RETRY_S = 10.0
ATTEMPT_S = 120.0
PARALLEL = 8
SMALL_BYTES = 1 << 20
"""Up to this size few peers are asked, the author first: many holders cost more than they save."""
FEW = 3


class BlobSource(Protocol):
    """What payloads need of the network."""

    def has_blob(self, blob: Digest) -> bool:
        """Complete and on disk."""

    def blob_path(self, blob: Digest) -> Path:
        """Where a held blob lies."""

    def delete_blob(self, blob: Digest) -> None:
        """Forget a blob."""

    def neighbours(self) -> list[PeerId]:
        """Connected peers."""

    async def fetch_blob(self, blob: Digest, holders: list[PeerId], max_bytes: int) -> Path:
        """Download and verify. Raises Unreachable, PeerFault or DiskFault."""


class Payloads:
    """Owns the downloads of payloads. One task per wanted payload, at most PARALLEL at work."""

    def __init__(
        self,
        blobs: BlobSource,
        payload_bytes: Callable[[Round], int],
        verify: Callable[[Path, Round], Awaitable[None]],
        on_held: Callable[[Digest], None],
        on_fault: Callable[[PeerId, AtollError], None],
        on_disk: Callable[[DiskFault], None],
    ) -> None:
        """`payload_bytes`: the legal size in a round. `on_held` hears of each wanted payload once; `on_disk` of a
        disk that refuses one: it is tried again.
        """
        self._blobs, self._payload_bytes = blobs, payload_bytes
        self._verify, self._on_held, self._on_fault, self._on_disk = verify, on_held, on_fault, on_disk
        self._wanted: dict[Digest, Round] = {}
        self._void: dict[Digest, Round] = {}
        self._slots = asyncio.Semaphore(PARALLEL)

    def held(self, payload: Digest) -> bool:
        """Whether the payload can be folded now."""
        return self._blobs.has_blob(payload) and payload not in self._wanted and payload not in self._void

    def want(self, group: asyncio.TaskGroup, payload: Digest, author: PeerId, number: Round) -> None:
        """Start getting a payload, unless that is under way or hopeless."""
        if payload in self._wanted or payload in self._void or self.held(payload):
            return
        self._wanted[payload] = number
        group.create_task(self._get(payload, author, number), name=f"payload {payload.hex()[:8]}")

    def forget(self, final: Round) -> None:
        """Stop getting payloads of rounds up to `final`."""
        for table in (self._wanted, self._void):
            for payload, number in list(table.items()):
                if number <= final:
                    del table[payload]

    async def mend(self, payload: Digest, author: PeerId, number: Round) -> None:
        """Return when a payload that was held is whole: what the disk lost or damaged is fetched again."""
        attempt = 0
        while True:
            try:
                await self._load(payload, author, number, attempt)
                return
            except DecodeError:
                self._drop(payload)
            except DiskFault as error:
                self._on_disk(error)
            except (AtollError, TimeoutError) as error:
                log.debug("payload %s: %s", payload.hex()[:8], error)
            attempt += 1
            await asyncio.sleep(pause_s(attempt))

    async def _get(self, payload: Digest, author: PeerId, number: Round) -> None:
        attempt = 0
        while payload in self._wanted and not await self._attempt(payload, author, number, attempt):
            attempt += 1
            await asyncio.sleep(pause_s(attempt))

    async def _attempt(self, payload: Digest, author: PeerId, number: Round, attempt: int) -> bool:
        """One try. True when there is nothing left to do."""
        try:
            async with self._slots:
                await self._load(payload, author, number, attempt)
        except DecodeError as error:
            if self._wanted.pop(payload, None) is not None:
                self._void[payload] = number
            self._drop(payload)
            self._on_fault(author, error)
            return True
        except DiskFault as error:
            self._on_disk(error)
            return False
        except (AtollError, TimeoutError) as error:
            log.debug("payload %s: %s", payload.hex()[:8], error)
            return False
        if self._wanted.pop(payload, None) is not None:
            self._on_held(payload)
        return True

    async def _load(self, payload: Digest, author: PeerId, number: Round, attempt: int) -> None:
        size = self._payload_bytes(number)
        async with asyncio.timeout(ATTEMPT_S):
            if not self._blobs.has_blob(payload):
                await self._blobs.fetch_blob(payload, self._whom(author, attempt, size), size)
            await self._verify(self._blobs.blob_path(payload), number)

    def _drop(self, payload: Digest) -> None:
        try:
            self._blobs.delete_blob(payload)
        except DiskFault as error:
            self._on_disk(error)

    def _whom(self, author: PeerId, attempt: int, size_bytes: int) -> list[PeerId]:
        """The author; for what is large, or on a second try, others too, in turn.

        An author who is not connected is dialled at every other try.
        """
        near = self._blobs.neighbours()
        others = [peer for peer in near if peer != author]
        if size_bytes <= SMALL_BYTES:
            first = FEW * attempt % max(1, len(others))
            others = (others[first:] + others[:first])[:FEW]
        if author in near:
            return [author] if attempt == 0 and size_bytes <= SMALL_BYTES else [author, *others]
        return [author, *others] if attempt % 2 or not others else others


def pause_s(attempt: int) -> float:
    """Rest before this try (from 1)."""
    return min(FIRST_RETRY_S * 2.0 ** min(attempt - 1, 16), LAST_RETRY_S)
