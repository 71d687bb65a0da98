"""Fetch one blob from its holders: several at once, rarest chunks first, verified, resumable.

A bad chunk is blamed on its sender and the download goes on with the others. What arrived stays on disk when
the download fails or is cancelled.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from atoll.p2p.blobs.download import Download
from atoll.p2p.blobs.frames import PROTOCOL
from atoll.p2p.blobs.holder_session import LOOK_S, HolderSession, NothingToOffer, TooSlow
from atoll.p2p.blobs.store import BlobStore
from atoll.p2p.host.interface import Host, Stream
from atoll.protocols.errors import LocalFault, PeerFault, Unreachable
from atoll.protocols.ids import Digest, PeerId, short

log = logging.getLogger(__name__)

FETCHES_AT_ONCE = 8
STALL_S = 20.0
"""A holder that owes us chunks and moves no byte for so long is given up for this download."""

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

        Holders are asked in the order given; those that still download it are welcome. Raises Unreachable (no
        holder gave it; what came is kept), DecodeError (the blob itself is larger than legal), DiskFault. The
        caller owns the deadline.
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
        others = [holder for holder in holders if holder != self._host.peer_id]
        job = Download(self._store, blob, max_bytes, others, start=_start(self._host.peer_id))
        try:
            manifest = self._store.known_manifest(blob)
            if manifest is None or await job.begin(manifest):
                await self._conduct(job)
            job.raise_failure()
            if job.partial is None or job.plan.missing:
                reasons = ", ".join(f"{short(peer)}: {why}" for peer, why in job.reasons.items())
                raise Unreachable(f"blob {short(blob)} from no holder ({reasons or 'nobody holds it'})")
            await asyncio.to_thread(self._store.finish, job.partial)
        finally:
            if job.partial is not None:
                await asyncio.to_thread(self._store.suspend, job.partial)

    async def _conduct(self, job: Download) -> None:
        """Keep enough conversations going until the job is over or nobody is left."""
        async with asyncio.TaskGroup() as group:
            pulls: set[asyncio.Task[None]] = set()
            flushing = group.create_task(self._flush(job))
            while not job.is_over:
                while (peer := job.next_holder()) is not None:
                    pull = group.create_task(self._work(job, peer))
                    pulls.add(pull)
                    pull.add_done_callback(pulls.discard)
                if not job.active:
                    break
                await job.changed(LOOK_S)
            for task in (*pulls, flushing):
                task.cancel()

    async def _flush(self, job: Download) -> None:
        """Beside the download, so that no chunk waits for the disk."""
        while True:
            await asyncio.sleep(LOOK_S)
            if job.partial is not None and job.partial.is_flush_due:
                try:
                    await asyncio.to_thread(job.partial.flush)
                except LocalFault as fault:
                    job.fail(fault)

    async def _work(self, job: Download, peer: PeerId) -> None:
        try:
            await self._converse(job, peer)
        except NothingToOffer as error:
            job.ask_later(peer, str(error))
        except TooSlow as error:
            log.info("blob %s: %s is dropped, %s", short(job.blob), peer, error)
            job.reasons[peer] = str(error)
            job.slow.append(peer)
        except Unreachable as error:
            job.reasons[peer] = str(error)
        except TimeoutError:
            job.reasons[peer] = f"stalled for {self._stall_s:.0f} s"
        except PeerFault as fault:
            job.reasons[peer] = str(fault)
            log.warning("blob %s: %s is dropped, it lied: %s", short(job.blob), peer, fault)
            self._on_fault(peer, fault)
        except LocalFault as fault:
            job.fail(fault)
        finally:
            job.remove_holder(peer)

    async def _converse(self, job: Download, peer: PeerId) -> None:
        async with asyncio.timeout(self._stall_s):
            stream: Stream = await self._host.open_stream(peer, PROTOCOL)
        try:
            await HolderSession(stream, job, self.bytes_down, self._stall_s).run()
            await stream.close()
        finally:
            stream.reset()


def _start(peer: PeerId) -> int:
    """Where this node begins among equally rare chunks: newcomers then have something for each other."""
    return int.from_bytes(peer.encode()[-8:], "little")
