"""Getting the payloads of others: fetch, verify, hold; again and again until they are not needed.

A payload is held when its bytes are on disk and the worker decoded them since the start: a blob of that name may
be something else, or have come just before a kill. Bytes that verify by hash but do not decode are void: their
author is blamed and they are never held. Where rounds exchange fragments their payloads differ in size: what is
legal in one round may be void in another.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from atoll.protocols.errors import AtollError, DecodeError, DiskFault
from atoll.protocols.ids import Digest, PeerId, Round

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.3
LAST_RETRY_S = 10.0
ATTEMPT_S = 120.0
PARALLEL = 8
Key = tuple[Digest, int]
"""A payload and the size that is legal in its round."""
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


class Wanted(NamedTuple):
    """What a contribution says that its payload is. Another may name the same bytes as something else."""

    payload: Digest
    round: Round
    experts: bytes


class Payloads:
    """Owns the downloads of payloads. One task per wanted payload, at most PARALLEL at work."""

    def __init__(
        self,
        blobs: BlobSource,
        payload_bytes: Callable[[Round, bytes], int],
        verify: Callable[[Path, Round, bytes], Awaitable[None]],
        on_held: Callable[[Digest], None],
        on_fault: Callable[[PeerId, AtollError], None],
        on_disk: Callable[[DiskFault], None],
    ) -> None:
        """`payload_bytes`: the legal size in a round of what covers these experts. `on_held` hears of each wanted
        payload once; `on_disk` of a disk that refuses one: it is tried again.
        """
        self._blobs, self._payload_bytes = blobs, payload_bytes
        self._verify, self._on_held, self._on_fault, self._on_disk = verify, on_held, on_fault, on_disk
        self._wanted: dict[Key, Round] = {}
        self._void: dict[Key, Round] = {}
        self._sound: set[Key] = set()
        self._fetched: set[Digest] = set()
        self._slots = asyncio.Semaphore(PARALLEL)

    def held(self, payload: Digest, number: Round, experts: bytes = b"") -> bool:
        """Whether the payload can be folded now, in this round, as what covers these experts."""
        return self._blobs.has_blob(payload) and self._key(payload, number, experts) in self._sound

    def trust(self, payload: Digest, number: Round, experts: bytes = b"") -> None:
        """Our own worker made it for this round: it needs no look."""
        self._sound.add(self._key(payload, number, experts))

    def want(
        self, group: asyncio.TaskGroup, payload: Digest, author: PeerId, number: Round, experts: bytes = b""
    ) -> None:
        """Start getting a payload, unless that is under way or hopeless."""
        wanted = Wanted(payload, number, experts)
        key = self._key(*wanted)
        if key in self._void or self.held(*wanted):
            return
        is_new = key not in self._wanted
        self._wanted[key] = max(number, self._wanted.get(key, number))
        if is_new:
            group.create_task(self._get(wanted, author), name=f"payload {payload.hex()[:8]}")

    def forget(self, final: Round) -> None:
        """Stop getting payloads of rounds up to `final`."""
        for table in (self._wanted, self._void):
            for key, number in list(table.items()):
                if number <= final:
                    del table[key]
        self._sound = {key for key in self._sound if self._blobs.has_blob(key[0])}
        self._fetched = {payload for payload in self._fetched if self._blobs.has_blob(payload)}

    async def mend(self, payload: Digest, author: PeerId, number: Round, experts: bytes = b"") -> None:
        """Return when a payload that was held is whole: what the disk lost or damaged is fetched again."""
        wanted, attempt = Wanted(payload, number, experts), 0
        while True:
            try:
                await self._load(wanted, author, attempt)
                return
            except DecodeError:
                self._drop(wanted.payload)
            except DiskFault as error:
                self._on_disk(error)
            except (AtollError, TimeoutError) as error:
                log.debug("payload %s: %s", payload.hex()[:8], error)
            attempt += 1
            await asyncio.sleep(pause_s(attempt))

    async def _get(self, wanted: Wanted, author: PeerId) -> None:
        attempt, key = 0, self._key(*wanted)
        while key in self._wanted and not await self._attempt(wanted, author, attempt):
            attempt += 1
            await asyncio.sleep(pause_s(attempt))

    async def _attempt(self, wanted: Wanted, author: PeerId, attempt: int) -> bool:
        """One try. True when there is nothing left to do."""
        key = self._key(*wanted)
        try:
            async with self._slots:
                await self._load(wanted, author, attempt)
        except DecodeError as error:
            before = self._wanted.pop(key, None)
            if before is not None:
                self._void[key] = before
            if wanted.payload in self._fetched and not any(wanted.payload == sound for sound, _ in self._sound):
                self._drop(wanted.payload)  # else it is something else's too
            self._on_fault(author, error)
            return True
        except DiskFault as error:
            self._on_disk(error)
            return False
        except (AtollError, TimeoutError) as error:
            log.debug("payload %s: %s", wanted.payload.hex()[:8], error)
            return False
        self._sound.add(key)
        if self._wanted.pop(key, None) is not None:
            self._on_held(wanted.payload)
        return True

    async def _load(self, wanted: Wanted, author: PeerId, attempt: int) -> None:
        blob, size = wanted.payload, self._payload_bytes(wanted.round, wanted.experts)
        async with asyncio.timeout(ATTEMPT_S):
            if not self._blobs.has_blob(blob):
                await self._blobs.fetch_blob(blob, self._whom(author, attempt, size), size)
                self._fetched.add(blob)
            await self._verify(self._blobs.blob_path(blob), wanted.round, wanted.experts)

    def _key(self, payload: Digest, number: Round, experts: bytes) -> Key:
        return payload, self._payload_bytes(number, experts)

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
