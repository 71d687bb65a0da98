"""Child of `bench blobs`: a node that holds or fetches blobs.

Arguments: a folder, an IP, then `lies`, `up=RATE`, `down=RATE`.
Orders: address, connect, cpu_s, make, fetch, raw, saved.
"""

import asyncio
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import uvloop

from atoll.p2p.blobs.fetch import Blobs
from atoll.p2p.blobs.store import BlobStore
from atoll.p2p.host.interface import Host, PeerAddress, Stream
from atoll.p2p.limits.config import LimitsConfig, read_limits
from atoll.p2p.limits.limited_host import LimitedHost
from atoll.p2p.system.atomic_files import make_folder
from atoll.p2p.transports.p2pd.process import P2pdOptions
from atoll.protocols.blobs import BLOB_CHUNK_BYTES, manifest_of_file
from atoll.protocols.errors import PeerFault
from atoll.protocols.ids import Digest, PeerId, digest
from atoll_bench.child import obey
from atoll_bench.host import fresh_p2pd, serving

RAW = "/atoll/bench/raw"
_PIECE_BYTES = 256 * 1024


class LyingStore(BlobStore):
    """Offers what it holds and sends other bytes."""

    def chunk(self, blob: Digest, index: int) -> bytes:
        """As many bytes as the chunk has, none of them right but by chance."""
        return bytes(len(super().chunk(blob, index)))


class Node:
    """One host with blobs, and raw streams of the same bytes beside them."""

    def __init__(self, folder: Path, ip: str, *, limits: LimitsConfig | None, lies: bool) -> None:
        self._folder = folder
        self._blamed: list[str] = []
        inner = fresh_p2pd(P2pdOptions(listen=(f"/ip4/{ip}/tcp/0",)), self._on_fault)
        self.host: Host = inner
        if limits is not None:
            self.host = LimitedHost(inner, read_limits(limits), folder / "month")
        self._store = (LyingStore if lies else BlobStore)(folder / "blobs")
        self._blobs = Blobs(self.host, self._store, self._on_fault)
        self.host.set_handler(RAW, self._serve_raw)

    async def address(self) -> tuple[str, tuple[str, ...]]:
        """PeerID and where it listens."""
        return self.host.peer_id, await self.host.addresses()

    async def connect(self, peer: str, maddrs: list[str]) -> None:
        """Dial a node."""
        await self.host.connect(PeerAddress(PeerId(peer), tuple(maddrs)))

    async def cpu_s(self) -> float:
        """CPU seconds of this process and of p2pd since they began."""
        me = psutil.Process()
        return sum(sum(process.cpu_times()[:2]) for process in (me, *me.children()))

    async def make(self, mib: int) -> str:
        """Hold the same blob of random bytes as every other node that is told so; its id."""
        path = self._folder / "source"
        source = random.Random(1)
        with path.open("wb") as file:
            for _ in range(mib):
                file.write(source.randbytes(BLOB_CHUNK_BYTES))
        blob = await asyncio.to_thread(self._blobs.store.add_file, path, move=True)
        return blob.hex()

    async def fetch(self, blob: str, holders: Sequence[str], max_bytes: int) -> dict[str, Any]:
        """Seconds of a download, who was blamed, and whether the file is what its id names; it is dropped then."""
        self._blamed.clear()
        wanted = Digest(bytes.fromhex(blob))
        began = time.perf_counter()
        path = await self._blobs.fetch(wanted, [PeerId(holder) for holder in holders], max_bytes)
        seconds = time.perf_counter() - began
        with path.open("rb") as file:
            right = await asyncio.to_thread(manifest_of_file, file)
        self._store.delete(wanted)
        return {"seconds": seconds, "right": right.id == wanted, "blamed": list(self._blamed)}

    async def raw(self, peer: str, blob: str, size: int) -> float:
        """Seconds for the same bytes over one stream, thrown away as they come."""
        began = time.perf_counter()
        async for _ in self._raw_pieces(PeerId(peer), bytes.fromhex(blob), size):
            pass
        return time.perf_counter() - began

    async def saved(self, peer: str, blob: str, size: int) -> float:
        """Seconds for the same bytes over one stream, then hashed and on the disk: the least a download can do."""
        path = self._folder / "saved"
        began = time.perf_counter()
        with path.open("wb") as file:
            async for piece in self._raw_pieces(PeerId(peer), bytes.fromhex(blob), size):
                file.write(piece)
                digest(piece)
            file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())
        seconds = time.perf_counter() - began
        path.unlink()
        return seconds

    async def _raw_pieces(self, peer: PeerId, blob: bytes, size: int) -> AsyncIterator[bytes]:
        stream = await self.host.open_stream(peer, RAW)
        try:
            await stream.write(blob)
            while size:
                piece = await stream.read_exactly(min(size, _PIECE_BYTES))
                yield piece
                size -= len(piece)
            await stream.close()
        finally:
            stream.reset()

    async def _serve_raw(self, stream: Stream) -> None:
        path = self._store.path(Digest(await stream.read_exactly(32)))
        with path.open("rb", buffering=0) as file:
            while piece := file.read(_PIECE_BYTES):
                await stream.write(piece)

    def _on_fault(self, peer: PeerId, _fault: PeerFault) -> None:
        self._blamed.append(peer)


async def main(folder: str, ip: str, *flags: str) -> None:
    """Until standard input ends."""
    rates = dict(flag.split("=") for flag in flags if "=" in flag)
    limits = LimitsConfig(up=rates.get("up", ""), down=rates.get("down", "")) if rates else None
    node = Node(make_folder(Path(folder)), ip, limits=limits, lies="lies" in flags)
    orders: dict[str, Any] = {
        "address": node.address,
        "connect": node.connect,
        "cpu_s": node.cpu_s,
        "make": node.make,
        "fetch": node.fetch,
        "raw": node.raw,
        "saved": node.saved,
    }
    async with serving(node.host):
        await obey(orders)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(*sys.argv[1:]))
