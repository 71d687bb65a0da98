"""The blobs of one node: the store, its server, and its fetcher."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.p2p.blobs.fetch import BlobFetcher, OnFault
from atoll.p2p.blobs.server import BlobServer
from atoll.p2p.blobs.store import BlobStore
from atoll.p2p.host.interface import Host
from atoll.protocols.ids import Digest, PeerId


@dataclass(frozen=True, slots=True)
class BlobStatistics:
    """Chunk bytes since the start, and current activity."""

    bytes_up: int
    bytes_down: int
    wire_bytes_up: int
    """Bytes sent by the server, frames and manifests included."""
    serving: int
    """Number of streams being served."""
    fetching: int
    """Number of blobs being fetched."""
    blobs: int
    """Number of whole blobs."""
    blobs_bytes: int
    """Size of all whole blobs."""


class Blobs:
    """Serves the blobs of `store` on `host`, and downloads into it."""

    def __init__(self, host: Host, store: BlobStore, on_fault: OnFault) -> None:
        self.store = store
        self._server = BlobServer(host, store)
        self._fetcher = BlobFetcher(host, store, on_fault)

    async def fetch(self, blob: Digest, holders: Sequence[PeerId], max_bytes: int) -> Path:
        """See BlobFetcher.fetch."""
        return await self._fetcher.fetch(blob, holders, max_bytes)

    async def add_file(self, path: Path, *, move: bool = False) -> Digest:
        """See BlobStore.add_file; hashing and copying run in a thread."""
        return await asyncio.to_thread(self.store.add_file, path, move=move)

    def bytes_of(self, peer: PeerId) -> tuple[int, int]:
        """Chunk bytes sent to and received from `peer`."""
        return self._server.bytes_up[peer], self._fetcher.bytes_down[peer]

    def statistics(self) -> BlobStatistics:
        """Totals so far and current activity."""
        return BlobStatistics(
            bytes_up=self._server.bytes_up.total(),
            bytes_down=self._fetcher.bytes_down.total(),
            wire_bytes_up=self._server.wire_bytes_up,
            serving=self._server.serving,
            fetching=self._fetcher.fetching,
            blobs=len(self.store.blobs()),
            blobs_bytes=self.store.size_of_all(),
        )
