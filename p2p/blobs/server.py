"""Serves blobs to peers: verified as they leave, a bounded number at a time, with fair turns between peers.

Each peer has one chunk being written at any time, over all its streams: the uplink is shared between peers, not
streams. Blobs that are still being fetched are served as far as they are present.
"""

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import cast

from atoll.p2p.blobs import frames
from atoll.p2p.blobs.store import BlobStore
from atoll.p2p.host.framing import framed, read_frame, size_prefix, write_in_parts
from atoll.p2p.host.interface import Host, Stream
from atoll.p2p.limits.bounded_table import NewestCounts, put_newest
from atoll.p2p.system.waiting import together
from atoll.protocols import codec
from atoll.protocols.blobs import BLOB_CHUNK_BYTES, BlobManifest
from atoll.protocols.errors import DecodeError, LocalFault, Unreachable
from atoll.protocols.ids import Digest, PeerId, short

log = logging.getLogger(__name__)

SERVES_PER_PEER = 4
SERVES_AT_ONCE = 32
FOR_NEWCOMERS = 4
"""Places that members do not take: 40 members that ask one holder would keep a newcomer from its snapshot."""
SLOW_BPS = 32 * 1024
"""Bytes per second below which a stream gives way where all places are taken, once it has had one whole chunk: 32
places at this rate are 1 MiB/s, about the uplink of a home, so holding all of them costs as much as using them."""
BARRED_S = 300.0
"""For so long a peer whose stream gave way as slow ends no other's: those that hold places cannot swap them."""
_MOST_BARRED = 256
ASK_S = 10.0
"""Seconds in which a stream says what it wants. It has no place before."""
IDLE_S = 60.0
"""Seconds without a request, or without progress of a write, after which a stream is ended."""
RESTING_S = 5.0
"""A stream that wants nothing for so many seconds gives way where all places are taken."""
HAVE_EVERY_S = 0.25
"""Interval, in seconds, at which an idle stream sends the bitmap of new chunks."""
COUNTED_PEERS = 1024
"""Bytes are counted by peer for so many at most: any number of keys ask for a blob and go."""
_WRITE_BYTES = 256 * 1024
_CHUNKS_IN_MEMORY = 4
"""Most chunks of one stream in memory: some are sent while the next are read and verified."""
_CHUNKS_AT_A_TIME = 2
"""Most chunks read in one call to a thread."""


class BlobServer:
    """Answers the blob protocol on one host."""

    def __init__(self, host: Host, store: BlobStore, *, idle_s: float = IDLE_S) -> None:
        self.store = store
        self._idle_s = idle_s
        self.refused: set[PeerId] = set()
        """Peers that get no blob: they were excluded from the run."""
        self.is_accepted: Callable[[PeerId], bool] = lambda peer: False
        """Whether final sets name a peer: others give way to it where all places are taken."""
        self._open: Counter[PeerId] = Counter()
        self._places: list[_Serve] = []
        self._barred: OrderedDict[PeerId, float] = OrderedDict()
        """Until when peers end no slow stream."""
        self._turns: dict[PeerId, asyncio.Lock] = {}
        self.bytes_up = NewestCounts[PeerId](COUNTED_PEERS)
        """Bytes of blobs sent, by newest peers; those of a copy that was broken off, too."""
        self.wire_bytes_up = 0
        """All bytes sent: chunks, manifests and answers with their frames."""
        host.set_handler(frames.PROTOCOL, self._handle)

    @property
    def serving(self) -> int:
        """Number of streams being served now."""
        return len(self._places)

    async def send(self, stream: Stream, data: bytes, *, is_blob: bool = False) -> None:
        """Write `data` in parts, each with a deadline. `is_blob`: it is of a blob. Raises Unreachable."""

        def count(size: int) -> None:
            self.wire_bytes_up += size
            if is_blob:
                self.bytes_up[stream.peer] += size

        await write_in_parts(stream, data, self._idle_s, part_bytes=_WRITE_BYTES, on_part=count)

    async def _handle(self, stream: Stream) -> None:
        peer = stream.peer
        self._open[peer] += 1
        turn = self._turns.setdefault(peer, asyncio.Lock())
        try:
            ask = await self._next_ask(stream)
            share = None if peer in self.refused else self.store.share(ask.blob)
            serve = None if share is None else _Serve(self, stream, ask, share[0], turn)
            if share is None or serve is None or not self._take_place(serve):
                refusal = frames.BlobRefusal("not here" if share is None else "busy")
                await self.send(stream, framed(codec.encode(refusal)))
                return
            try:
                await serve.run(share[1], self._idle_s)
            finally:
                if serve in self._places:
                    self._places.remove(serve)
        except LocalFault as fault:
            log.warning("cannot serve a blob to %s: %s", short(peer), fault.line())
            raise Unreachable("a fault on this machine") from fault
        finally:
            self._open[peer] -= 1
            if not self._open[peer]:
                del self._open[peer], self._turns[peer]

    def _take_place(self, serve: "_Serve") -> bool:
        """Whether a stream is served; where all places are taken, one that deserves its place less ends."""
        held = Counter(each.peer for each in self._places)
        if held[serve.peer] >= SERVES_PER_PEER:
            return False
        rivals, most = self._places, SERVES_AT_ONCE
        if self.is_accepted(serve.peer):
            members = [each for each in rivals if self.is_accepted(each.peer)]
            if len(members) >= SERVES_AT_ONCE - FOR_NEWCOMERS:
                rivals, most = members, len(members)
        if len(rivals) >= most:
            if (last := self._last(serve, rivals, held)) is None:
                return False
            self._places.remove(last)
            last.end()
        self._places.append(serve)
        return True

    def _last(self, serve: "_Serve", rivals: list["_Serve"], held: Counter[PeerId]) -> "_Serve | None":
        """The stream that ends for `serve`; None: its peer asks again."""
        # Strangers cost nothing: 32 streams of theirs must keep no member from its payload, nor a newcomer
        # whose peer has no place from a snapshot.
        last = max(rivals, key=lambda each: (not self.is_accepted(each.peer), held[each.peer], each.rested_s()))
        is_member = self.is_accepted(serve.peer)
        if (is_member and not self.is_accepted(last.peer)) or held[last.peer] > held[serve.peer] + 1:
            return last
        last = max(rivals, key=lambda each: each.rested_s())
        return last if last.rested_s() >= RESTING_S else self._slowest(serve, rivals, is_member=is_member)

    def _slowest(self, serve: "_Serve", rivals: list["_Serve"], *, is_member: bool) -> "_Serve | None":
        now_s = asyncio.get_running_loop().time()
        if self._barred.get(serve.peer, 0.0) > now_s:
            return None
        rates = {
            each: each.rate_bps()
            for each in rivals
            if each.sent_bytes and (is_member or not self.is_accepted(each.peer))
        }
        last = min(rates, key=rates.__getitem__, default=None)
        if last is None or rates[last] >= SLOW_BPS:
            return None
        put_newest(self._barred, last.peer, now_s + BARRED_S, _MOST_BARRED)
        return last

    async def _next_ask(self, stream: Stream) -> frames.Ask:
        try:
            async with asyncio.timeout(min(ASK_S, self._idle_s)):
                return codec.decode(
                    await read_frame(stream, frames.ASK_MAX_BYTES), frames.Ask, max_bytes=frames.ASK_MAX_BYTES
                )
        except TimeoutError as error:
            raise Unreachable("the peer asks for nothing") from error


class _Serve:
    """One stream: chunks that were requested and are not sent yet."""

    def __init__(
        self,
        server: BlobServer,
        stream: Stream,
        ask: frames.Ask,
        manifest: BlobManifest,
        turn: asyncio.Lock,
    ) -> None:
        self.peer = stream.peer
        self._server = server
        self._stream = stream
        self._blob: Digest = ask.blob
        self._at_once = ask.at_once
        self._manifest = manifest
        self._turn = turn
        self._offered = 0
        self._wishes: deque[int] = deque()
        self._asked = asyncio.Event()
        self._loaded: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
        self._room = asyncio.Semaphore(_CHUNKS_IN_MEMORY)
        self._cancelled: set[int] = set()
        self._unsent = 0  # chunks that are read or on their way
        self._began_s = self._active_s = asyncio.get_running_loop().time()
        self.sent_bytes = 0
        """Bytes of whole chunks that the peer took."""

    def rate_bps(self) -> float:
        """Bytes per second that the peer took since the stream began, with all of the chunk that is on its way."""
        lasted_s = max(asyncio.get_running_loop().time() - self._began_s, 1.0)
        return (self.sent_bytes + BLOB_CHUNK_BYTES) / lasted_s

    def rested_s(self) -> float:
        """Seconds for which the peer wants nothing; 0.0 while it does."""
        is_waited_for = self._wishes or self._unsent
        return 0.0 if is_waited_for else asyncio.get_running_loop().time() - self._active_s

    def end(self) -> None:
        """Give the place to another stream: the peer asks again."""
        self._stream.reset()

    async def run(self, have: int, idle_s: float) -> None:
        """Offer, then send requested chunks. Raises Unreachable when the peer ends the stream, DecodeError."""
        chunks = self._manifest.chunks
        self._offered = have
        await self._write(frames.BlobOffer(codec.encode(self._manifest), frames.pack_bits(have, chunks)))
        self._wishes.extend(index for index in range(min(self._at_once, chunks)) if have >> index & 1)
        await together(self._receive(), self._load(), self._send(idle_s))

    async def _receive(self) -> None:
        while True:
            data = await read_frame(self._stream, frames.ASK_MAX_BYTES)
            wish = codec.decode(
                data, cast(type[frames.Want | frames.Cancel], frames.Wish), max_bytes=frames.ASK_MAX_BYTES
            )
            if isinstance(wish, frames.Cancel):
                self._cancel(wish.index)
                continue
            if wish.index >= self._manifest.chunks or not self._offered >> wish.index & 1:
                raise DecodeError(f"wants chunk {wish.index}, which was not offered")
            if len(self._wishes) >= frames.WINDOW:
                raise DecodeError(f"more than {frames.WINDOW} wishes at once")
            self._wishes.append(wish.index)
            self._cancelled.discard(wish.index)
            self._active_s = asyncio.get_running_loop().time()
            self._asked.set()

    def _cancel(self, index: int) -> None:
        if index in self._wishes:
            self._wishes.remove(index)
        elif index < self._manifest.chunks:
            self._cancelled.add(index)

    async def _load(self) -> None:
        while True:
            await self._room.acquire()
            while not self._wishes:
                self._asked.clear()
                await self._asked.wait()
            batch = [self._wishes.popleft()]
            while self._wishes and len(batch) < _CHUNKS_AT_A_TIME and not self._room.locked():
                await self._room.acquire()
                batch.append(self._wishes.popleft())
            self._unsent += len(batch)
            for loaded in await asyncio.to_thread(self._read, batch):
                self._loaded.put_nowait(loaded)

    def _read(self, batch: list[int]) -> list[tuple[int, bytes]]:
        return [(index, self._server.store.chunk(self._blob, index)) for index in batch]

    async def _send(self, idle_s: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._send_new_chunks()
            try:
                async with asyncio.timeout(idle_s if self._is_whole else HAVE_EVERY_S):
                    index, data = await self._loaded.get()
            except TimeoutError as error:
                if loop.time() - self._active_s >= idle_s and not self._wishes:
                    raise Unreachable("the peer asks for nothing") from error
                continue
            if index not in self._cancelled:
                await self._send_chunk(index, data)
            self._cancelled.discard(index)
            self._room.release()
            self._unsent -= 1
            self._active_s = loop.time()

    async def _send_chunk(self, index: int, data: bytes) -> None:
        async with self._turn:
            head = framed(codec.encode(frames.Chunk(index)))
            await self._server.send(self._stream, head + size_prefix(len(data)))
            await self._server.send(self._stream, data, is_blob=True)
        self.sent_bytes += len(data)

    @property
    def _is_whole(self) -> bool:
        return self._offered.bit_count() == self._manifest.chunks

    async def _send_new_chunks(self) -> None:
        """Send the bitmap of newly fetched chunks. If the blob was deleted, the next request fails."""
        share = None if self._is_whole else self._server.store.share(self._blob)
        if share is not None and share[1] & ~self._offered:
            self._offered |= share[1]
            await self._write(frames.Have(frames.pack_bits(self._offered, self._manifest.chunks)))

    async def _write(self, message: frames.BlobOffer | frames.Have) -> None:
        await self._server.send(self._stream, framed(codec.encode(message)))
