"""Getting the payloads of others: fetch, verify, hold; again and again until they are not needed.

A payload is held when its bytes are on disk and the worker found them, since the start, to be what a record says
that they are: a blob of that name may be something else, or have come just before a kill. Bytes that verify by
hash but are not what the record says are void: its author is blamed and they are never held. What is legal in one
record may be void in another: as a payload of another fragment, as one of other experts or with other rows, as
that of a Reduction.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from atoll.protocols.errors import AtollError, DecodeError, DiskFault
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.coverage import payload_size
from atoll.protocols.run.arena import Span
from atoll.protocols.run.payload import payload_bytes
from atoll.protocols.run.run_spec import RunSpec

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.3
LAST_RETRY_S = 10.0
ATTEMPT_S = 120.0
PARALLEL = 8
SMALL_BYTES = 1 << 20
"""Up to this size few peers are asked, the author first: many holders cost more than they save."""
FEW = 3


class Named(NamedTuple):
    """What a record says that a payload is. Another may name the same bytes as something else."""

    payload: Digest
    round: Round
    experts: bytes = b""
    """Bitmap of those that it covers; empty: all."""
    rows: bytes = b""
    """Merkle root of its rows; empty: the record has none."""
    slice: tuple[Span, ...] = ()
    """Of a Reduction: the chunks that it covers."""


Key = tuple[Digest, int, bytes, tuple[Span, ...]]
"""A payload, its legal size, and what else was said of it. Experts make a payload by their number only."""


def legal_size(spec: RunSpec, named: Named) -> int:
    """The only legal length: what a node may ask for before it saw a byte."""
    if named.slice and spec.reduce:
        return payload_bytes("sparse2", named.slice[0].chunks, spec.reduce.k)
    return payload_size(spec, named.round, named.experts)


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
        size_of: Callable[[Named], int],
        verify: Callable[[Path, Named], Awaitable[None]],
        on_settled: Callable[[Named], None],
        on_fault: Callable[[PeerId, AtollError], None],
        on_disk: Callable[[DiskFault], None],
    ) -> None:
        """`size_of`: the one legal size. `on_settled` hears once of each wanted payload that it is held, or void;
        `on_disk` of a disk that refuses one: it is tried again.
        """
        self._blobs, self._size_of = blobs, size_of
        self._verify, self._on_settled, self._on_fault, self._on_disk = verify, on_settled, on_fault, on_disk
        self._wanted: dict[Key, Round] = {}
        self._void: dict[Key, Round] = {}
        self._sound: set[Key] = set()
        self._fetched: set[Digest] = set()
        self._slots = asyncio.Semaphore(PARALLEL)

    def held(self, named: Named) -> bool:
        """Whether the payload can be folded now, as what is said of it."""
        return self._blobs.has_blob(named.payload) and self._key(named) in self._sound

    def is_void(self, named: Named) -> bool:
        """Whether it was looked at, and is not what is said of it."""
        return self._key(named) in self._void

    def trust(self, named: Named) -> None:
        """Our own worker made it so: it needs no look."""
        self._sound.add(self._key(named))

    def want(self, group: asyncio.TaskGroup, named: Named, author: PeerId) -> None:
        """Start getting a payload, unless that is under way or hopeless."""
        key = self._key(named)
        if key in self._void or self.held(named):
            return
        is_new = key not in self._wanted
        self._wanted[key] = max(named.round, self._wanted.get(key, named.round))
        if is_new:
            group.create_task(self._get(named, author), name=f"payload {named.payload.hex()[:8]}")

    def forget(self, final: Round) -> None:
        """Stop getting payloads of rounds up to `final`."""
        for table in (self._wanted, self._void):
            for key, number in list(table.items()):
                if number <= final:
                    del table[key]
        self._sound = {key for key in self._sound if self._blobs.has_blob(key[0])}
        self._fetched = {payload for payload in self._fetched if self._blobs.has_blob(payload)}

    async def mend(self, named: Named, author: PeerId) -> None:
        """Return when a payload that was held is whole: what the disk lost or damaged is fetched again."""
        attempt = 0
        while True:
            try:
                await self._load(named, author, attempt)
                return
            except DecodeError:
                self._drop(named.payload)
            except DiskFault as error:
                self._on_disk(error)
            except (AtollError, TimeoutError) as error:
                log.debug("payload %s: %s", named.payload.hex()[:8], error)
            attempt += 1
            await asyncio.sleep(pause_s(attempt))

    async def _get(self, named: Named, author: PeerId) -> None:
        attempt, key = 0, self._key(named)
        while key in self._wanted and not await self._attempt(named, author, attempt):
            attempt += 1
            await asyncio.sleep(pause_s(attempt))

    async def _attempt(self, named: Named, author: PeerId, attempt: int) -> bool:
        """One try. True when there is nothing left to do."""
        key = self._key(named)
        try:
            async with self._slots:
                await self._load(named, author, attempt)
        except DecodeError as error:
            self._refuse(named, author, error)
            return True
        except DiskFault as error:
            self._on_disk(error)
            return False
        except (AtollError, TimeoutError) as error:
            log.debug("payload %s: %s", named.payload.hex()[:8], error)
            return False
        self._sound.add(key)
        if self._wanted.pop(key, None) is not None:
            self._on_settled(named)
        return True

    def _refuse(self, named: Named, author: PeerId, error: DecodeError) -> None:
        key, payload = self._key(named), named.payload
        wanted = self._wanted.pop(key, None)
        if wanted is not None:
            self._void[key] = wanted
        if payload in self._fetched and not any(payload == sound[0] for sound in self._sound):
            self._drop(payload)  # else it is something else's too
        self._on_fault(author, error)
        if wanted is not None:
            self._on_settled(named)

    async def _load(self, named: Named, author: PeerId, attempt: int) -> None:
        payload, size = named.payload, self._size_of(named)
        async with asyncio.timeout(ATTEMPT_S):
            if not self._blobs.has_blob(payload):
                await self._blobs.fetch_blob(payload, self._whom(author, attempt, size), size)
                self._fetched.add(payload)
            await self._verify(self._blobs.blob_path(payload), named)

    def _key(self, named: Named) -> Key:
        return named.payload, self._size_of(named), named.rows, named.slice

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
            others = few_in_turn(others, attempt)
        if author in near:
            return [author] if attempt == 0 and size_bytes <= SMALL_BYTES else [author, *others]
        return [author, *others] if attempt % 2 or not others else others


def few_in_turn(peers: list[PeerId], attempt: int) -> list[PeerId]:
    """Some of them, with each attempt the next ones."""
    first = FEW * attempt % max(1, len(peers))
    return (peers[first:] + peers[:first])[:FEW]


def pause_s(attempt: int) -> float:
    """Rest before this try (from 1)."""
    return min(FIRST_RETRY_S * 2.0 ** min(attempt - 1, 16), LAST_RETRY_S)
