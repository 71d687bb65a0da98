"""A peer that does everything a byte at a time: it sends so, it reads so, and it answers so (slowloris)."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable

from atoll.p2p.blobs import frames as blob_frames
from atoll.p2p.host.framing import framed, read_frame, size_prefix, write_frame
from atoll.p2p.host.interface import Host, PeerAddress, Stream
from atoll.p2p.rpc import frames
from atoll.p2p.system.waiting import together
from atoll.protocols import codec
from atoll.protocols.blobs import BLOB_CHUNK_BYTES, manifest_of_bytes
from atoll.protocols.errors import Unreachable
from atoll.protocols.ids import Digest, PeerId, RunId
from atoll.protocols.wires import RUN

FRAME = framed(frames.request(1, "slow", bytes(60_000)))
"""A request that would take a peer like this 17 hours."""


class SlowPeer:
    def __init__(self, host: Host, run: RunId, pace_s: float) -> None:
        """`pace_s`: seconds between two bytes."""
        self.host, self.run, self.pace_s = host, run, pace_s
        self.opened: Counter[str] = Counter()
        """Streams of each kind so far."""
        host.set_handler(frames.PROTOCOL, self._answer_calls)

    def hold(self, data: bytes) -> None:
        """Offer a blob, and send its chunks a byte at a time."""
        offer = blob_frames.BlobOffer(codec.encode(manifest_of_bytes(data)), b"")

        async def serve(stream: Stream) -> None:
            await read_frame(stream, blob_frames.ASK_MAX_BYTES)
            await write_frame(stream, codec.encode(offer))
            chunk = framed(codec.encode(blob_frames.Chunk(0))) + framed(data[:BLOB_CHUNK_BYTES])
            await together(self._drip(stream, chunk), self._swallow(stream))

        self.host.set_handler(blob_frames.PROTOCOL, serve)

    async def attack(self, victim: PeerAddress, kinds: dict[str, Callable[[Stream], Awaitable[None]]]) -> None:
        """One stream of each kind after the other to the victim, all kinds at once, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for name, way in kinds.items():
                group.create_task(self._repeat(victim, name, way))

    async def _repeat(self, victim: PeerAddress, name: str, way: Callable[[Stream], Awaitable[None]]) -> None:
        protocol, task = name.partition(" ")[0], asyncio.current_task()
        assert task is not None
        # A stream may break in the moment of the cancellation: then a task group of Python 3.11 raises that alone.
        while not task.cancelling():
            with contextlib.suppress(Unreachable):
                await self.host.connect(victim)
                stream = await self.host.open_stream(victim.peer, protocol)
                self.opened[name] += 1
                try:
                    await way(stream)
                finally:
                    stream.reset()
            await asyncio.sleep(self.pace_s)

    # --- ways to use a stream; each ends with Unreachable when the victim has had enough ----------------------

    def sends(self, data: bytes, first: Callable[[Stream], Awaitable[None]] | None = None):
        """A byte of `data` at a time, after what is done `first`."""

        async def way(stream: Stream) -> None:
            if first is not None:
                await first(stream)
            await together(self._drip(stream, data), self._sip(stream))

        return way

    def reads(self, *requests: bytes, first: Callable[[Stream], Awaitable[None]] | None = None):
        """Requests as fast as they can be sent, and a byte of the answers at a time."""

        async def way(stream: Stream) -> None:
            if first is not None:
                await first(stream)
            await together(self._send_all(stream, requests), self._sip(stream))

        return way

    async def greet(self, stream: Stream) -> None:
        """The Hello of the calls wire, at once."""
        await write_frame(stream, self.hello)
        await read_frame(stream, frames.HELLO_MAX_BYTES)

    @property
    def hello(self) -> bytes:
        return codec.encode(frames.hello(self.run, self.host.peer_id, "slow"))

    def kinds(self, blob: Digest, reduction: str) -> dict[str, Callable[[Stream], Awaitable[None]]]:
        """All ways against a member. `blob`: it serves that one; `reduction`: the protocol of single requests."""
        ask = framed(codec.encode(blob_frames.Ask(blob, 4)))
        return {
            f"{frames.PROTOCOL} hello": self.sends(framed(self.hello)),
            f"{frames.PROTOCOL} frame": self.sends(FRAME, self.greet),
            f"{reduction} request": self.sends(size_prefix(900) + bytes(900)),
            f"{reduction} answer": self.reads(framed(b"all of it")),
            f"{blob_frames.PROTOCOL} ask": self.sends(ask),
            f"{blob_frames.PROTOCOL} blob": self.reads(ask),
            f"{RUN.protocol()} run": self.sends(size_prefix(32) + bytes(32)),
        }

    async def _drip(self, stream: Stream, data: bytes) -> None:
        for at in range(len(data)):
            await stream.write(data[at : at + 1])
            await asyncio.sleep(self.pace_s)

    async def _sip(self, stream: Stream) -> None:
        while True:
            await stream.read_exactly(1)
            await asyncio.sleep(self.pace_s)

    async def _send_all(self, stream: Stream, requests: tuple[bytes, ...]) -> None:
        for request in requests:
            await stream.write(request)

    async def _answer_calls(self, stream: Stream) -> None:
        """The other side's calls: the Hello is in order, and every answer is a byte a time."""
        await read_frame(stream, frames.HELLO_MAX_BYTES)
        await write_frame(stream, self.hello)
        await together(self._drip(stream, FRAME), self._swallow(stream))

    async def _swallow(self, stream: Stream) -> None:
        while True:
            await read_frame(stream, 1 << 20)


def streams_of(host: Host, peer: PeerId) -> list[Stream]:
    """Streams that `host` has open with `peer`."""
    return [stream for stream in host._streams.open if stream.peer == peer]  # type: ignore[attr-defined]
