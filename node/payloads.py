"""Getting the payloads of others: fetch, verify, hold; again and again until they are not needed.

A payload is held when its bytes are on disk and the worker decoded them. Bytes that verify by hash
but do not decode are void: their author is blamed and they are never held.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from atoll.protocols.errors import AtollError, DecodeError, DiskFault, Unreachable
from atoll.protocols.ids import Digest, PeerId, Round

FIRST_RETRY_S = 0.3
LAST_RETRY_S = 10.0
ATTEMPT_S = 120.0
PARALLEL = 8


class BlobSource(Protocol):
    """What payloads need of the network."""

    def has_blob(self, blob: Digest) -> bool:
        """Complete and on disk."""

    def blob_path(self, blob: Digest) -> Path:
        """Where a held blob lies."""

    def delete_blob(self, blob: Digest) -> None:
        """Forget a blob."""

    def holders(self, first: PeerId) -> list[PeerId]:
        """Peers to ask, `first` in front if it is connected."""

    async def fetch_blob(self, blob: Digest, holders: list[PeerId], max_bytes: int) -> Path:
        """Download and verify. Raises Unreachable, PeerFault or DiskFault."""


class Payloads:
    """Owns the downloads of payloads. One task per wanted payload, at most PARALLEL at work."""

    def __init__(
        self,
        blobs: BlobSource,
        payload_bytes: int,
        verify: Callable[[Path], Awaitable[None]],
        on_held: Callable[[Digest], None],
        on_fault: Callable[[PeerId, AtollError], None],
    ) -> None:
        self._blobs, self._payload_bytes = blobs, payload_bytes
        self._verify, self._on_held, self._on_fault = verify, on_held, on_fault
        self._wanted: dict[Digest, Round] = {}
        self._void: set[Digest] = set()
        self._slots = asyncio.Semaphore(PARALLEL)

    def held(self, payload: Digest) -> bool:
        """Whether the payload can be folded now."""
        return self._blobs.has_blob(payload) and payload not in self._wanted and payload not in self._void

    def want(self, group: asyncio.TaskGroup, payload: Digest, author: PeerId, number: Round) -> None:
        """Start getting a payload, unless that is under way or hopeless."""
        if payload in self._wanted or payload in self._void or self.held(payload):
            return
        self._wanted[payload] = number
        group.create_task(self._get(payload, author), name=f"payload {payload.hex()[:8]}")

    def forget(self, final: Round) -> None:
        """Stop getting payloads of rounds up to `final`."""
        for payload, number in list(self._wanted.items()):
            if number <= final:
                del self._wanted[payload]

    async def _get(self, payload: Digest, author: PeerId) -> None:
        pause_s = FIRST_RETRY_S
        while payload in self._wanted:
            if await self._attempt(payload, author):
                return
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, LAST_RETRY_S)

    async def _attempt(self, payload: Digest, author: PeerId) -> bool:
        """One try. True when there is nothing left to do."""
        try:
            async with self._slots, asyncio.timeout(ATTEMPT_S):
                if not self._blobs.has_blob(payload):
                    await self._blobs.fetch_blob(payload, self._blobs.holders(author), self._payload_bytes)
                await self._verify(self._blobs.blob_path(payload))
        except DecodeError as error:
            self._void.add(payload)
            self._wanted.pop(payload, None)
            self._blobs.delete_blob(payload)
            self._on_fault(author, error)
            return True
        except (Unreachable, DiskFault, TimeoutError, AtollError):
            return False
        if self._wanted.pop(payload, None) is not None:
            self._on_held(payload)
        return True
