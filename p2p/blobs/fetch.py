"""Fetches blobs from their holders: several holders at once, rarest chunks first, verified, resumable.

A bad chunk counts as a fault of its sender, and the download continues with the others. Chunks that arrived stay
on disk when the download fails or is cancelled.

`Blobs` puts the blobs of one node together: the store, its server and its fetcher.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.p2p.blobs.download import Download, DownloadProgress
from atoll.p2p.blobs.frames import PROTOCOL
from atoll.p2p.blobs.holder_session import LOOK_S, HolderSession, NothingToOffer, TooSlow
from atoll.p2p.blobs.probe import offers_whole
from atoll.p2p.blobs.server import COUNTED_PEERS, BlobServer
from atoll.p2p.blobs.store import BlobStore
from atoll.p2p.host.interface import Host, Stream
from atoll.p2p.limits.bounded_table import NewestCounts
from atoll.protocols.errors import LocalFault, PeerFault, Unreachable
from atoll.protocols.ids import Digest, PeerId, short

log = logging.getLogger(__name__)
FETCHES_AT_ONCE = 8
STALL_S = 20.0
"""Seconds without a byte after which a holder that owes us chunks is dropped from this download."""
OnFault = Callable[[PeerId, PeerFault], None]


class BlobFetcher:
    """Downloads blobs into one store."""

    def __init__(self, host: Host, store: BlobStore, on_fault: OnFault, *, stall_s: float = STALL_S) -> None:
        self._host = host
        self._store = store
        self._on_fault = on_fault
        self._stall_s = stall_s
        self._slots = asyncio.Semaphore(FETCHES_AT_ONCE)
        self._locks: dict[Digest, asyncio.Lock] = {}
        self._downloads: set[Download] = set()
        self.bytes_down = NewestCounts[PeerId](COUNTED_PEERS)

    async def fetch(self, blob: Digest, holders: Sequence[PeerId], max_bytes: int) -> Path:
        """Download a blob and return its file. `max_bytes`: legal size, from the RunSpec, never from the wire.

        Holders are asked in the given order and may still be downloading it themselves. Raises Unreachable (no
        holder gave it; received chunks are kept), DecodeError (the blob is larger than legal), DiskFault. The
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

    def bytes_here(self, blob: Digest) -> int:
        """Verified bytes of a blob that is fetched now."""
        parts = [download.partial for download in self._downloads if download.blob == blob]
        return max((part.bytes_here for part in parts if part), default=0)

    def largest(self) -> DownloadProgress | None:
        """The largest blob that is fetched now; None where none is, or none's size is known."""
        known = [found for download in self._downloads if (found := download.progress()) is not None]
        return max(known, key=lambda found: found.of_bytes, default=None)

    async def _download(self, blob: Digest, holders: Sequence[PeerId], max_bytes: int) -> None:
        others = [holder for holder in holders if holder != self._host.peer_id]
        download = Download(self._store, blob, max_bytes, others, start=_start(self._host.peer_id))
        self._downloads.add(download)
        try:
            manifest = self._store.known_manifest(blob)
            if manifest is None or await download.begin(manifest):
                await self._conduct(download)
            download.raise_failure()
            if download.partial is None or download.plan.missing:
                reasons = ", ".join(f"{short(peer)}: {why}" for peer, why in download.reasons.items())
                raise Unreachable(f"blob {short(blob)} from no holder ({reasons or 'nobody holds it'})")
            await asyncio.to_thread(self._store.finish, download.partial)
        finally:
            self._downloads.discard(download)
            if download.partial is not None:
                await asyncio.to_thread(self._store.suspend, download.partial)

    async def _conduct(self, download: Download) -> None:
        """Keep enough sessions running until the download is over or no holder is left."""
        async with asyncio.TaskGroup() as group:
            sessions: set[asyncio.Task[None]] = set()
            flushing = group.create_task(self._flush(download))
            while not download.is_over:
                while (peer := download.next_holder()) is not None:
                    session = group.create_task(self._work(download, peer))
                    sessions.add(session)
                    session.add_done_callback(sessions.discard)
                if not download.active:
                    break
                await download.changed(LOOK_S)
            for task in (*sessions, flushing):
                task.cancel()

    async def _flush(self, download: Download) -> None:
        """Flush beside the download, so that no chunk waits for the disk."""
        while True:
            await asyncio.sleep(LOOK_S)
            if download.partial is not None and download.partial.is_flush_due:
                try:
                    await asyncio.to_thread(download.partial.flush)
                except LocalFault as fault:
                    download.fail(fault)

    async def _work(self, download: Download, peer: PeerId) -> None:
        try:
            await self._converse(download, peer)
        except NothingToOffer as error:
            download.ask_later(peer, str(error))
        except TooSlow as error:
            log.info("blob %s: %s is dropped, %s", short(download.blob), peer, error)
            download.reasons[peer] = str(error)
            download.slow.append(peer)
        except Unreachable as error:
            download.reasons[peer] = str(error)
        except TimeoutError:
            download.reasons[peer] = f"stalled for {self._stall_s:.0f} s"
        except PeerFault as fault:
            download.reasons[peer] = str(fault)
            log.warning("blob %s: %s is dropped, it lied: %s", short(download.blob), peer, fault)
            self._on_fault(peer, fault)
        except LocalFault as fault:
            download.fail(fault)
        finally:
            download.remove_holder(peer)

    async def _converse(self, download: Download, peer: PeerId) -> None:
        async with asyncio.timeout(self._stall_s):
            stream: Stream = await self._host.open_stream(peer, PROTOCOL)
        try:
            await HolderSession(stream, download, self.bytes_down, self._stall_s).run()
            await stream.close()
        finally:
            stream.reset()


def _start(peer: PeerId) -> int:
    """This node's first choice among equally rare chunks: newcomers then have different chunks to exchange."""
    return int.from_bytes(peer.encode()[-8:], "little")


@dataclass(frozen=True, slots=True)
class BlobStatistics:
    """Chunk bytes since the start, and current activity."""

    bytes_up: int
    bytes_down: int
    wire_bytes_up: int
    """Bytes sent by the server, frames and manifests included."""


class Blobs:
    """Serves the blobs of `store` on `host`, and downloads into it."""

    def __init__(
        self,
        host: Host,
        store: BlobStore,
        on_fault: OnFault,
        is_accepted: Callable[[PeerId], bool] = lambda peer: False,
    ) -> None:
        self.store = store
        self._host = host
        self._server = BlobServer(host, store)
        self._server.is_accepted = is_accepted
        self._fetcher = BlobFetcher(host, store, on_fault)

    async def fetch(self, blob: Digest, holders: Sequence[PeerId], max_bytes: int) -> Path:
        """See BlobFetcher.fetch."""
        return await self._fetcher.fetch(blob, holders, max_bytes)

    async def offers_whole(self, peer: PeerId, blob: Digest) -> bool:
        """See probe.py. The blob is here, so its size is known."""
        return await offers_whole(self._host, peer, blob, self.store.size(blob))

    def fetched_bytes(self, blob: Digest) -> int:
        """See BlobFetcher.bytes_here."""
        return self._fetcher.bytes_here(blob)

    def largest_download(self) -> DownloadProgress | None:
        """See BlobFetcher.largest."""
        return self._fetcher.largest()

    def refuse(self, peer: PeerId) -> None:
        """Serve no blob to `peer` any more."""
        self._server.refused.add(peer)

    def refuse_nobody(self) -> None:
        """Undo every `refuse`."""
        self._server.refused.clear()

    def is_refused(self, peer: PeerId) -> bool:
        """Whether `peer` gets no blob."""
        return peer in self._server.refused

    def count_pushed(self, peer: PeerId, *, up_bytes: int = 0, down_bytes: int = 0) -> None:
        """Count bytes that pushed.py sent or received."""
        self._server.bytes_up[peer] += up_bytes
        self._server.wire_bytes_up += up_bytes
        self._fetcher.bytes_down[peer] += down_bytes

    def bytes_of(self, peer: PeerId) -> tuple[int, int]:
        """Chunk bytes sent to and received from `peer`."""
        return self._server.bytes_up[peer], self._fetcher.bytes_down[peer]

    def statistics(self) -> BlobStatistics:
        """Totals so far."""
        return BlobStatistics(
            bytes_up=self._server.bytes_up.total(),
            bytes_down=self._fetcher.bytes_down.total(),
            wire_bytes_up=self._server.wire_bytes_up,
        )
