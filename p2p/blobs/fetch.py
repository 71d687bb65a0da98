"""Fetch one blob from its holders: several at once, chunk by chunk, verified, resumable.

A bad chunk is blamed on its sender and the download goes on with the others. What arrived stays on disk when
the download fails or is cancelled.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from atoll.p2p.blobs.frames import (
    OFFER_OVERHEAD_BYTES,
    PROTOCOL,
    WINDOW,
    Answer,
    Ask,
    Done,
    Offer,
    Refusal,
    Want,
)
from atoll.p2p.blobs.store import BlobStore, Partial
from atoll.p2p.framing import read_frame, write_frame
from atoll.p2p.host import Host, Stream
from atoll.protocols import codec
from atoll.protocols.blobs import BLOB_CHUNK_BYTES, MANIFEST_MAX_BYTES, Manifest, decode_manifest
from atoll.protocols.errors import DecodeError, LocalFault, PeerFault, Unreachable
from atoll.protocols.ids import DIGEST_BYTES, Digest, PeerId, short

HOLDERS_AT_ONCE = 4
FETCHES_AT_ONCE = 8
STALL_S = 20.0
"""A holder that moves no frame for so long is given up for this download."""

_DONE_BYTES = 16
OnFault = Callable[[PeerId, PeerFault], None]


class BlobFetcher:
    """Downloads into one store."""

    def __init__(self, host: Host, store: BlobStore, on_fault: OnFault, *, stall_s: float = STALL_S) -> None:
        self._host = host
        self._store = store
        self._on_fault = on_fault
        self._stall_s = stall_s
        self._slots = asyncio.Semaphore(FETCHES_AT_ONCE)
        self._locks: dict[Digest, asyncio.Lock] = {}
        self.bytes_down: Counter[PeerId] = Counter()

    @property
    def fetching(self) -> int:
        """Blobs that are being fetched or waited for."""
        return len(self._locks)

    async def fetch(self, blob: Digest, holders: Sequence[PeerId], max_bytes: int) -> Path:
        """The blob's file. `max_bytes`: legal size, from the RunSpec, never from the wire.

        Raises Unreachable (no holder gave it; what came is kept), DecodeError (the blob itself is larger than
        legal), DiskFault. The caller owns the deadline.
        """
        if self._store.has(blob):
            return self._store.path(blob)
        lock = self._locks.setdefault(blob, asyncio.Lock())
        try:
            async with self._slots, lock:
                if not self._store.has(blob):
                    await self._download(blob, holders, max_bytes)
                return self._store.path(blob)
        finally:
            if not lock.locked():
                self._locks.pop(blob, None)

    async def _download(self, blob: Digest, holders: Sequence[PeerId], max_bytes: int) -> None:
        job = _Job(self._store, blob, max_bytes, deque(dict.fromkeys(holders)))
        if (manifest := self._store.known_manifest(blob)) is not None:
            job.check(manifest)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(HOLDERS_AT_ONCE, len(job.holders))):
                    group.create_task(self._work(job))
            job.raise_failure()
            if job.partial is None or job.partial.missing():
                reasons = ", ".join(f"{short(peer)}: {why}" for peer, why in job.reasons.items())
                raise Unreachable(f"blob {short(blob)} from no holder ({reasons or 'nobody holds it'})")
            await asyncio.to_thread(self._store.finish, job.partial)
        finally:
            if job.partial is not None:
                job.partial.close()

    async def _work(self, job: "_Job") -> None:
        """Take one holder after the other until the job is over."""
        while job.holders and not job.is_over:
            peer = job.holders.popleft()
            try:
                await self._pull(job, peer)
            except Unreachable as error:
                job.reasons[peer] = str(error)
            except TimeoutError:
                job.reasons[peer] = f"stalled for {self._stall_s:.0f} s"
            except PeerFault as fault:
                job.reasons[peer] = str(fault)
                if not job.is_over:
                    self._on_fault(peer, fault)
            except LocalFault as fault:
                job.fail(fault)

    async def _pull(self, job: "_Job", peer: PeerId) -> None:
        async with asyncio.timeout(self._stall_s):
            stream = await self._host.open_stream(peer, PROTOCOL)
        try:
            if await self._is_offered(stream, job, peer):
                await self._pull_chunks(stream, job)
            await self._say(stream, Done())
            codec.decode(await self._hear(stream, _DONE_BYTES), Done)
            await stream.close()
        finally:
            stream.reset()

    async def _is_offered(self, stream: Stream, job: "_Job", peer: PeerId) -> bool:
        await self._say(stream, Ask(job.blob))
        cap = OFFER_OVERHEAD_BYTES + manifest_cap(job.max_bytes)
        data = await self._hear(stream, cap)
        answer = codec.decode(data, cast(type[Offer | Refusal], Answer), max_bytes=cap)
        if isinstance(answer, Refusal):
            job.reasons[peer] = "".join(letter for letter in answer.reason if letter.isprintable())
            return False
        manifest = decode_manifest(answer.manifest, job.blob)
        async with job.opening:
            if job.check(manifest):
                await asyncio.to_thread(job.begin, manifest)
        return not job.is_over

    async def _pull_chunks(self, stream: Stream, job: "_Job") -> None:
        asked: deque[int] = deque()
        try:
            while not job.is_over:
                while len(asked) < WINDOW and (index := job.take()) is not None:
                    asked.append(index)
                    await self._say(stream, Want(index))
                if asked:
                    await self._read_chunk(stream, job, asked)
                else:
                    await job.changed()
            if asked:
                raise Unreachable("given up for a fault on this machine")
        finally:
            job.give_back(asked)

    async def _read_chunk(self, stream: Stream, job: "_Job", asked: deque[int]) -> None:
        data = await self._hear(stream, job.chunk_bytes(asked[0]))
        self.bytes_down[stream.peer] += len(data)
        await asyncio.to_thread(job.write, asked[0], data)
        asked.popleft()
        job.tell()

    async def _say(self, stream: Stream, message: Ask | Want | Done) -> None:
        async with asyncio.timeout(self._stall_s):
            await write_frame(stream, codec.encode(message))

    async def _hear(self, stream: Stream, max_bytes: int) -> bytes:
        async with asyncio.timeout(self._stall_s):
            return await read_frame(stream, max_bytes)


def manifest_cap(max_bytes: int) -> int:
    """Bytes of the manifest of a blob of `max_bytes`."""
    chunks = -(-max_bytes // BLOB_CHUNK_BYTES)
    return min(MANIFEST_MAX_BYTES, 64 + DIGEST_BYTES * chunks)


class _Job:
    """What the workers of one download share."""

    def __init__(self, store: BlobStore, blob: Digest, max_bytes: int, holders: deque[PeerId]) -> None:
        self.blob = blob
        self.max_bytes = max_bytes
        self.holders = holders
        self.reasons: dict[PeerId, str] = {}
        self.partial: Partial | None = None
        self.opening = asyncio.Lock()
        self._store = store
        self._todo: deque[int] = deque()
        self._failure: LocalFault | DecodeError | None = None
        self._change = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Complete, or failed for a reason that no other holder can mend."""
        return self._failure is not None or (self.partial is not None and self.partial.is_complete)

    def check(self, manifest: Manifest) -> bool:
        """True if the download should begin with this manifest; fails the job if the blob is too large."""
        if manifest.size_bytes > self.max_bytes:
            size = f"{manifest.size_bytes} bytes where at most {self.max_bytes} are legal"
            self.fail(DecodeError(f"blob {short(self.blob)} has {size}"))
        return self._failure is None and self.partial is None

    def begin(self, manifest: Manifest) -> None:
        """Open the partial file."""
        partial = self._store.begin(manifest)
        self._todo.extend(partial.missing())
        self.partial = partial

    def take(self) -> int | None:
        """A chunk that nobody has asked for."""
        return self._todo.popleft() if self._todo else None

    def give_back(self, indices: deque[int]) -> None:
        """Chunks that were asked for and did not come."""
        self._todo.extendleft(reversed(indices))
        self.tell()

    def chunk_bytes(self, index: int) -> int:
        """Legal size of a chunk."""
        assert self.partial is not None
        return self.partial.manifest.chunk_bytes(index)

    def write(self, index: int, data: bytes) -> None:
        """Raises DecodeError for a chunk that does not verify, DiskFault."""
        assert self.partial is not None
        self.partial.write(index, data)

    def fail(self, failure: LocalFault | DecodeError) -> None:
        """No holder can help."""
        self._failure = self._failure or failure
        self.tell()

    def raise_failure(self) -> None:
        """Raise what `fail` was given."""
        if self._failure is not None:
            raise self._failure

    def tell(self) -> None:
        """Wake the workers that wait in `changed`."""
        self._change.set()
        self._change = asyncio.Event()

    async def changed(self) -> None:
        """Until a chunk came or was given back."""
        await self._change.wait()
