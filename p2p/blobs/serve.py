"""Send blobs to peers that ask: verified as they leave, a bounded number at a time."""

import asyncio
from collections import Counter
from typing import cast

from atoll.p2p.blobs.frames import (
    ASK_MAX_BYTES,
    PROTOCOL,
    Answer,
    Ask,
    Done,
    Offer,
    Refusal,
    Want,
    Wish,
)
from atoll.p2p.blobs.store import BlobStore
from atoll.p2p.framing import PREFIX_BYTES, read_frame, write_frame
from atoll.p2p.host import Host, Stream
from atoll.protocols import codec
from atoll.protocols.blobs import Manifest
from atoll.protocols.errors import DecodeError, Unreachable
from atoll.protocols.ids import Digest, PeerId

SERVES_PER_PEER = 4
SERVES_AT_ONCE = 32
IDLE_S = 60.0
"""A peer that asks for nothing, or takes nothing, for so long gives its place to others."""


class BlobServer:
    """Answers the blob protocol on one host."""

    def __init__(self, host: Host, store: BlobStore, *, idle_s: float = IDLE_S) -> None:
        self._store = store
        self._idle_s = idle_s
        self._serving: Counter[PeerId] = Counter()
        self.bytes_up: Counter[PeerId] = Counter()
        self.wire_bytes_up = 0
        """Chunks, manifests and answers with their frames: all that serving blobs sends."""
        host.set_handler(PROTOCOL, self._handle)

    @property
    def serving(self) -> int:
        """Streams being served now."""
        return self._serving.total()

    async def _handle(self, stream: Stream) -> None:
        peer = stream.peer
        is_busy = self._serving[peer] >= SERVES_PER_PEER or self.serving >= SERVES_AT_ONCE
        self._serving[peer] += 1
        try:
            ask = codec.decode(await self._next_frame(stream), Ask, max_bytes=ASK_MAX_BYTES)
            manifest = self._store.manifest(ask.blob)
            if is_busy or manifest is None:
                await self._answer(stream, Refusal("busy" if is_busy else "not here"))
                await self._wait_done(stream)
            else:
                await self._answer(stream, Offer(codec.encode(manifest)))
                await self._send_chunks(stream, ask.blob, manifest)
            await self._answer(stream, Done())
        except TimeoutError as error:
            raise Unreachable("the peer neither asks nor takes") from error
        finally:
            self._serving[peer] -= 1
            if not self._serving[peer]:
                del self._serving[peer]

    async def _send_chunks(self, stream: Stream, blob: Digest, manifest: Manifest) -> None:
        while True:
            wish = await self._next_wish(stream)
            if isinstance(wish, Done):
                return
            if wish.index >= manifest.chunks:
                raise DecodeError(f"chunk {wish.index} of a blob of {manifest.chunks}")
            data = await asyncio.to_thread(self._store.chunk, blob, wish.index)
            async with asyncio.timeout(self._idle_s):
                await write_frame(stream, data)
            self.bytes_up[stream.peer] += len(data)
            self.wire_bytes_up += PREFIX_BYTES + len(data)

    async def _wait_done(self, stream: Stream) -> None:
        if not isinstance(await self._next_wish(stream), Done):
            raise DecodeError("a wish for a blob that was refused")

    async def _next_wish(self, stream: Stream) -> Want | Done:
        return codec.decode(await self._next_frame(stream), cast(type[Want | Done], Wish), max_bytes=ASK_MAX_BYTES)

    async def _next_frame(self, stream: Stream) -> bytes:
        async with asyncio.timeout(self._idle_s):
            return await read_frame(stream, ASK_MAX_BYTES)

    async def _answer(self, stream: Stream, answer: Answer | Done) -> None:
        data = codec.encode(answer)
        self.wire_bytes_up += PREFIX_BYTES + len(data)
        async with asyncio.timeout(self._idle_s):
            await write_frame(stream, data)
