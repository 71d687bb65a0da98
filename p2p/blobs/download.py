"""One download: the state that its sessions with several holders share."""

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.p2p.blobs.chunk_schedule import PATIENCE_S, ChunkSchedule
from atoll.p2p.blobs.partial import PartialBlob
from atoll.p2p.blobs.store import BlobStore
from atoll.p2p.system.waiting import backoff_s
from atoll.protocols.blobs import BlobManifest
from atoll.protocols.errors import DecodeError, LocalFault
from atoll.protocols.ids import Digest, PeerId, short

HOLDERS_AT_ONCE = 8
ASK_AGAIN_S = 1.0
"""First pause, in seconds, before a holder that had no chunk for us is asked again; it doubles each time."""
ASK_AGAIN_LATEST_S = 30.0
"""Longest such pause, in seconds."""
NEXT_HOLDER_S = 0.3
"""Interval between the first requests to holders, until one makes an offer: a small blob costs one stream."""


@dataclass(frozen=True, slots=True)
class DownloadProgress:
    """How far a download is."""

    done_bytes: int
    """Bytes that are here, those of earlier attempts too."""
    of_bytes: int
    took_s: float
    """Seconds since this attempt knew the blob's size."""
    left_s: float | None
    """Seconds to its end at the mean pace of this attempt; None before anything came."""


class Download:
    """A download in progress. `BlobFetcher` runs it; one `HolderSession` per holder works on it."""

    def __init__(
        self, store: BlobStore, blob: Digest, max_bytes: int, holders: Sequence[PeerId], *, start: int = 0
    ) -> None:
        """`start`: a number of this node, so that nodes do not all request the same chunks first."""
        self.blob = blob
        self.max_bytes = max_bytes
        self.waiting = deque(dict.fromkeys(holders))
        self.slow: deque[PeerId] = deque()
        """Holders that were dropped for being slow; they are used again when no other is left."""
        self.active: set[PeerId] = set()
        self._later: dict[PeerId, float] = {}
        self._refusals: Counter[PeerId] = Counter()
        self.reasons: dict[PeerId, str] = {}
        self.partial: PartialBlob | None = None
        self.plan = ChunkSchedule(0)
        self._clock = asyncio.get_running_loop().time
        self.moved_s = self._clock()
        """Time of the newest progress."""
        self._began_s, self._began_bytes = self.moved_s, 0
        self._store = store
        self._start = start
        self._opening = asyncio.Lock()
        self._asked_s = self.moved_s
        self._eager: PeerId | None = None
        self._failure: LocalFault | DecodeError | None = None
        self._change = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether it is complete, or failed for a reason that no holder can remove."""
        return self._failure is not None or (self.partial is not None and not self.plan.missing)

    def progress(self) -> DownloadProgress | None:
        """How far it is; None before the blob's size is known."""
        if self.partial is None:
            return None
        done, size = self.partial.bytes_here, self.partial.manifest.size_bytes
        took_s = self._clock() - self._began_s
        came = done - self._began_bytes
        return DownloadProgress(done, size, took_s, took_s * (size - done) / came if came > 0 else None)

    def next_holder(self) -> PeerId | None:
        """The holder to begin a session with now; None: not yet, or none is left."""
        now_s = asyncio.get_running_loop().time()
        if self.is_over or len(self.active) >= HOLDERS_AT_ONCE or not self._wants_another(now_s):
            return None
        self._recall(now_s)
        if not self.waiting and not self.active:
            self.waiting, self.slow = self.slow, deque()
        if not self.waiting:
            return None
        self._asked_s = now_s
        peer = self.waiting.popleft()
        self.active.add(peer)
        return peer

    def ask_later(self, peer: PeerId, reason: str) -> None:
        """Ask a holder that has no chunk for us again later: it may still be downloading."""
        self.reasons[peer] = reason
        self._refusals[peer] += 1
        pause_s = backoff_s(self._refusals[peer], first_s=ASK_AGAIN_S, max_s=ASK_AGAIN_LATEST_S)
        self._later[peer] = asyncio.get_running_loop().time() + pause_s

    def at_once(self, peer: PeerId) -> int:
        """Number of chunks that this holder should send at once: one for the first holder of all, else none."""
        if self.partial is None and self._eager is None:
            self._eager = peer
            return 1
        return 0

    async def begin(self, manifest: BlobManifest) -> bool:
        """Open the partial file unless it is open. False: the download is over. Raises DiskFault."""
        async with self._opening:
            if self.check(manifest):
                await asyncio.to_thread(self._begin, manifest)
        return not self.is_over

    def check(self, manifest: BlobManifest) -> bool:
        """Whether the download should begin with this manifest; fails the download if the blob is too large."""
        if manifest.size_bytes > self.max_bytes:
            size = f"{manifest.size_bytes} bytes where at most {self.max_bytes} are legal"
            self.fail(DecodeError(f"blob {short(self.blob)} has {size}"))
        return self._failure is None and self.partial is None

    def remove_holder(self, peer: PeerId) -> None:
        """End the session with a holder."""
        self.active.discard(peer)
        self.plan.leave(peer)
        if self._eager == peer:
            self._eager = None
        self.notify_changed()

    def fail(self, failure: LocalFault | DecodeError) -> None:
        """End the download with a failure that no holder can remove."""
        self._failure = self._failure or failure
        self.notify_changed()

    def raise_failure(self) -> None:
        """Raise the failure given to `fail`, if any."""
        if self._failure is not None:
            raise self._failure

    def notify_changed(self) -> None:
        """Wake all tasks that wait in `changed`."""
        self._change.set()
        self._change = asyncio.Event()

    async def changed(self, limit_s: float) -> None:
        """Wait for the next change, at most `limit_s` seconds."""
        change = self._change
        try:
            async with asyncio.timeout(limit_s):
                await change.wait()
        except TimeoutError:
            return

    def _recall(self, now_s: float) -> None:
        for peer in [peer for peer, at_s in self._later.items() if at_s <= now_s]:
            del self._later[peer]
            self.waiting.append(peer)

    def _wants_another(self, now_s: float) -> bool:
        if not self.active:
            return True
        if self.partial is None:
            return now_s - self._asked_s >= NEXT_HOLDER_S
        return bool(self.plan.todo) or self.plan.left_s(now_s) > PATIENCE_S

    def _begin(self, manifest: BlobManifest) -> None:
        partial = self._store.begin(manifest)
        missing = sum(1 << index for index in partial.missing())
        self.plan = ChunkSchedule(missing, self._start % max(1, manifest.chunks))
        self._began_s, self._began_bytes = self._clock(), partial.bytes_here
        self.partial = partial
