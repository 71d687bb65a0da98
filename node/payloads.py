"""Getting the payloads of others: fetch, verify, hold; again and again until they are not needed.

A payload is held when its bytes are on disk and the worker decoded them. Bytes that verify by hash
but do not decode are void: their author is blamed and they are never held.
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
SMALL_BYTES = 1 << 20
"""Up to this size few peers are asked, the author first: many holders cost more than they save."""
FEW = 3


class BlobSource(Protocol):
    """What payloads need of the network."""

    def has_blob(self, blob: Digest) -> bool:
        """Complete and on disk."""

    def blob_path(self, blob: Digest) -> Path:
        """Where a held blob lies."""

    def blob_size(self, blob: Digest) -> int:
        """Bytes of a held blob."""

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
        on_held: Callable[[Wanted], None],
        on_fault: Callable[[PeerId, AtollError], None],
        on_disk: Callable[[DiskFault], None],
    ) -> None:
        """`payload_bytes`: the legal size in a round of what covers these experts. `on_held` hears of each wanted
        payload once; `on_disk` of a disk that refuses one: it is tried again.
        """
        self._blobs, self._payload_bytes = blobs, payload_bytes
        self._verify, self._on_held, self._on_fault, self._on_disk = verify, on_held, on_fault, on_disk
        self._wanted: set[Wanted] = set()
        self._void: set[Wanted] = set()
        self._slots = asyncio.Semaphore(PARALLEL)

    def held(self, payload: Digest, number: Round, experts: bytes = b"") -> bool:
        """Whether the payload can be folded now, as what a contribution says that it is."""
        wanted = Wanted(payload, number, experts)
        return self._is_here(wanted) and wanted not in self._wanted and wanted not in self._void

    def want(
        self, group: asyncio.TaskGroup, payload: Digest, author: PeerId, number: Round, experts: bytes = b""
    ) -> None:
        """Start getting a payload, unless that is under way or hopeless."""
        wanted = Wanted(payload, number, experts)
        if wanted in self._wanted or wanted in self._void or self.held(payload, number, experts):
            return
        self._wanted.add(wanted)
        group.create_task(self._get(wanted, author), name=f"payload {payload.hex()[:8]}")

    def forget(self, final: Round) -> None:
        """Stop getting payloads of rounds up to `final`."""
        self._wanted = {wanted for wanted in self._wanted if wanted.round > final}
        self._void = {wanted for wanted in self._void if wanted.round > final}

    async def mend(self, payload: Digest, author: PeerId, number: Round, experts: bytes = b"") -> None:
        """Return when a payload that was held is whole: what the disk lost or damaged is fetched again."""
        wanted, attempt = Wanted(payload, number, experts), 0
        while True:
            try:
                await self._load(wanted, author, attempt)
                return
            except DecodeError:
                self._drop(wanted)
            except DiskFault as error:
                self._on_disk(error)
            except (AtollError, TimeoutError) as error:
                log.debug("payload %s: %s", payload.hex()[:8], error)
            attempt += 1
            await asyncio.sleep(pause_s(attempt))

    async def _get(self, wanted: Wanted, author: PeerId) -> None:
        attempt = 0
        while wanted in self._wanted and not await self._attempt(wanted, author, attempt):
            attempt += 1
            await asyncio.sleep(pause_s(attempt))

    async def _attempt(self, wanted: Wanted, author: PeerId, attempt: int) -> bool:
        """One try. True when there is nothing left to do."""
        try:
            async with self._slots:
                await self._load(wanted, author, attempt)
        except DecodeError as error:
            if wanted in self._wanted:
                self._wanted.remove(wanted)
                self._void.add(wanted)
            self._drop(wanted)
            self._on_fault(author, error)
            return True
        except DiskFault as error:
            self._on_disk(error)
            return False
        except (AtollError, TimeoutError) as error:
            log.debug("payload %s: %s", wanted.payload.hex()[:8], error)
            return False
        if wanted in self._wanted:
            self._wanted.remove(wanted)
            self._on_held(wanted)
        return True

    async def _load(self, wanted: Wanted, author: PeerId, attempt: int) -> None:
        blob, size = wanted.payload, self._payload_bytes(wanted.round, wanted.experts)
        async with asyncio.timeout(ATTEMPT_S):
            if not self._blobs.has_blob(blob):
                await self._blobs.fetch_blob(blob, self._whom(author, attempt, size), size)
            if not self._is_here(wanted):
                raise DecodeError(f"a payload of another size than the {size} bytes of what it is said to cover")
            await self._verify(self._blobs.blob_path(blob), wanted.round, wanted.experts)

    def _is_here(self, wanted: Wanted) -> bool:
        """On disk, with the one legal size: whose size is another, that contribution never counts."""
        size = self._payload_bytes(wanted.round, wanted.experts)
        return self._blobs.has_blob(wanted.payload) and self._blobs.blob_size(wanted.payload) == size

    def _drop(self, wanted: Wanted) -> None:
        """Delete what does not decode; bytes of another size may be what another contribution says they are."""
        if not self._is_here(wanted):
            return
        try:
            self._blobs.delete_blob(wanted.payload)
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
