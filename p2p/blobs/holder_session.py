"""One session of a download: requests chunks from one holder, receives and verifies them."""

import asyncio
from collections import Counter
from typing import cast

from atoll.p2p.blobs import frames
from atoll.p2p.blobs.chunk_schedule import FlowWindow
from atoll.p2p.blobs.download import HOLDERS_AT_ONCE, Download
from atoll.p2p.host.framing import PREFIX_BYTES, frame_size, read_frame, write_frame
from atoll.p2p.host.interface import Stream
from atoll.p2p.system.waiting import together
from atoll.protocols import codec
from atoll.protocols.blobs import BLOB_CHUNK_BYTES, MANIFEST_MAX_BYTES, BlobManifest, decode_manifest
from atoll.protocols.errors import DecodeError, Unreachable
from atoll.protocols.ids import DIGEST_BYTES, PeerId

ROTATE_S = 3.0
"""Seconds after which a holder without useful chunks gives its place to a waiting one."""
LOOK_S = 0.1
"""Interval, in seconds, of the checks for late chunks and slow holders."""
_READ_BYTES = 64 * 1024
_CAME_CHUNKS = 2
"""Received chunks of one holder that wait to be verified; they share one call to a thread."""
_PIECE_MAX_BYTES = frames.HAVE_MAX_BYTES + 64


class NothingToOffer(Unreachable):
    """The holder has no chunk that is missing here now."""


class TooSlow(Unreachable):
    """The holder is far slower than the others."""


class HolderSession:
    """Works on a download until it is over; the caller then cancels `run`."""

    def __init__(self, stream: Stream, download: Download, bytes_down: Counter[PeerId], stall_s: float) -> None:
        self._stream = stream
        self._peer = stream.peer
        self._download = download
        self._bytes_down = bytes_down
        self._stall_s = stall_s
        self._now = asyncio.get_running_loop().time
        self._pace = FlowWindow(self._now())
        self._owed: set[int] = set()
        """Chunks that may legally arrive: requested ones, cancelled ones included."""
        self._came: asyncio.Queue[tuple[int, memoryview]] = asyncio.Queue(_CAME_CHUNKS)
        self._spare: list[bytearray] = []
        """Buffers for reuse: fresh memory for every chunk costs more than hashing it."""
        self._is_long = True
        """Whether the blob has more than one chunk."""
        self._useful_s = self._now()

    async def run(self) -> None:
        """Run the session. Raises PeerFault (illegal bytes), LocalFault, TooSlow, NothingToOffer, Unreachable."""
        at_once = self._download.at_once(self._peer)
        asked_s = self._now()
        async with asyncio.timeout(self._stall_s):
            await self._send(frames.Ask(self._download.blob, at_once))
            offer = await self._receive_offer()
        self._pace.rtt_s = self._now() - asked_s
        manifest = decode_manifest(offer.manifest, self._download.blob)
        self._is_long = manifest.chunks > 1
        if await self._download.begin(manifest):
            self._join(manifest, offer, at_once)
            await together(self._receive(manifest), self._write_chunks(), self._steer())

    async def _receive_offer(self) -> frames.BlobOffer:
        cap = frames.OFFER_OVERHEAD_BYTES + frames.HAVE_MAX_BYTES + manifest_cap(self._download.max_bytes)
        data = await read_frame(self._stream, cap)
        answer = codec.decode(
            data, cast(type[frames.BlobOffer | frames.BlobRefusal], frames.Answer), max_bytes=cap
        )
        if isinstance(answer, frames.BlobOffer):
            return answer
        raise NothingToOffer("".join(letter for letter in answer.reason if letter.isprintable()))

    def _join(self, manifest: BlobManifest, offer: frames.BlobOffer, at_once: int) -> None:
        plan, have = self._download.plan, frames.unpack_bits(offer.have, manifest.chunks)
        plan.join(self._peer, have, self._pace)
        for index in range(min(at_once, manifest.chunks)):
            if have >> index & 1:
                self._owed.add(index)
                plan.ask(self._peer, index, self._now())

    # --- receive --------------------------------------------------------------------------------

    async def _receive(self, manifest: BlobManifest) -> None:
        try:
            await self._receive_pieces(manifest)
        except Unreachable:
            await self._came.join()  # a peer that sends a bad chunk and hangs up is still found out
            raise

    async def _receive_pieces(self, manifest: BlobManifest) -> None:
        while True:
            data = await read_frame(self._stream, _PIECE_MAX_BYTES)
            piece = codec.decode(
                data, cast(type[frames.Have | frames.Chunk], frames.Piece), max_bytes=_PIECE_MAX_BYTES
            )
            if isinstance(piece, frames.Have):
                self._download.plan.add_chunks(self._peer, frames.unpack_bits(piece.have, manifest.chunks))
                self._download.notify_changed()
                continue
            if piece.index not in self._owed:
                raise DecodeError(f"chunk {piece.index} came without being asked for")
            self._owed.discard(piece.index)
            body = await self._read_body(manifest.chunk_bytes(piece.index))
            self._download.plan.received(self._peer, piece.index)
            self._download.notify_changed()
            await self._came.put((piece.index, body))

    async def _read_body(self, size: int) -> memoryview:
        if (announced := frame_size(await self._stream.read_exactly(PREFIX_BYTES), size)) < size:
            raise DecodeError(f"a chunk of {announced} bytes where {size} are legal")
        # A small blob takes no buffer of a whole chunk: the end of a session may keep it until the garbage goes.
        fresh_bytes = BLOB_CHUNK_BYTES if self._is_long else size
        body = memoryview(self._spare.pop() if self._spare else bytearray(fresh_bytes))[:size]
        for start in range(0, size, _READ_BYTES):
            part = await self._stream.read_exactly(min(_READ_BYTES, size - start))
            body[start : start + len(part)] = part
            self._pace.moved(len(part), self._now())
            self._bytes_down[self._peer] += len(part)
        return body

    async def _write_chunks(self) -> None:
        """Verify and write received chunks while more arrive."""
        download = self._download
        assert download.partial is not None
        while True:
            batch = [await self._came.get()]
            while not self._came.empty():
                batch.append(self._came.get_nowait())
            chunks = [(index, body) for index, body in batch if download.plan.missing >> index & 1]
            if chunks:
                await asyncio.to_thread(download.partial.write_all, chunks)
                for index, _ in chunks:
                    download.plan.verified(index)
                download.moved_s = self._useful_s = self._now()
                download.notify_changed()
            for _, body in batch:
                self._spare.append(cast(bytearray, body.obj))
                self._came.task_done()

    # --- request --------------------------------------------------------------------------------

    async def _steer(self) -> None:
        plan = self._download.plan
        while True:
            self._check_holder()
            for index in plan.stale(self._peer):
                await self._request(frames.Cancel(index))
            while (wish := plan.next(self._peer, self._now())) is not None:
                plan.ask(self._peer, wish, self._now())
                self._owed.add(wish)
                await self._request(frames.Want(wish))
            await self._download.changed(LOOK_S)

    def _check_holder(self) -> None:
        """Raise Unreachable, TooSlow or NothingToOffer if this session is no longer useful."""
        now_s, download = self._now(), self._download
        on_the_way = download.plan.in_flight(self._peer)
        if on_the_way and now_s - self._pace.moved_s > self._stall_s:
            raise Unreachable(f"stalled for {self._stall_s:.0f} s")
        if download.plan.is_slow(self._peer, now_s):
            raise TooSlow(f"slow: {(self._pace.rate_bytes_s(now_s) or 0) / 1e3:.0f} kB/s, others give much more")
        if on_the_way or download.plan.can_help(self._peer):
            self._useful_s = now_s
        is_dead_end = now_s - max(download.moved_s, self._useful_s) > self._stall_s
        if is_dead_end or (
            download.waiting and len(download.active) >= HOLDERS_AT_ONCE and now_s - self._useful_s > ROTATE_S
        ):
            raise NothingToOffer("has no chunk that is missing here")

    async def _request(self, wish: frames.Want | frames.Cancel) -> None:
        try:
            await self._send(wish)
        except Unreachable:
            await asyncio.sleep(self._stall_s)  # the reader sees the end, too, after the bytes sent before it
            raise

    async def _send(self, message: frames.Ask | frames.Want | frames.Cancel) -> None:
        async with asyncio.timeout(self._stall_s):
            await write_frame(self._stream, codec.encode(message))


def manifest_cap(max_bytes: int) -> int:
    """Largest manifest, in bytes, of a blob of `max_bytes`."""
    chunks = -(-max_bytes // BLOB_CHUNK_BYTES)
    return min(MANIFEST_MAX_BYTES, 64 + DIGEST_BYTES * chunks)
