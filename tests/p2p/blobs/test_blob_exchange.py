"""Blobs between hosts: several holders, liars, silence, limits; on the simulated network and on p2pd."""

import asyncio
import random
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from atoll.p2p.blobs.fetch import BlobFetcher
from atoll.p2p.blobs.frames import PROTOCOL, WINDOW, Ask, BlobOffer, Cancel, Chunk, Want
from atoll.p2p.blobs.server import SERVES_PER_PEER, BlobServer
from atoll.p2p.blobs.store import BlobStore
from atoll.p2p.host.framing import framed, read_frame, size_prefix, write_frame
from atoll.p2p.host.interface import Host, PeerAddress, Stream
from atoll.p2p.transports.memory.memory_network import MemoryNetwork
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.p2p.transports.p2pd.p2pd_host import P2pdHost
from atoll.protocols import codec
from atoll.protocols.blobs import BLOB_CHUNK_BYTES, manifest_of_bytes
from atoll.protocols.errors import DecodeError, PeerFault, Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Digest, PeerId
from tests.waiting import HANGS_S

DATA = random.Random(1).randbytes(9 * BLOB_CHUNK_BYTES + 100)
MANIFEST = manifest_of_bytes(DATA)
BLOB = MANIFEST.id
CAP = 16 << 20


class Lab:
    """One fetcher, connected to holders with handlers of any kind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.network = MemoryNetwork(seed=1, latency_s=0.01, bandwidth_bps=200e6)
        self.faults: list[PeerId] = []
        self.store = BlobStore(path / "own")
        self._number = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self.host = await self._serve()
        self.fetcher = BlobFetcher(self.host, self.store, self._blame, stall_s=5.0)

    async def holder(self, prepare: Callable[[Host], object]) -> PeerId:
        """A connected host; `prepare` sets its handler."""
        host = await self._serve()
        prepare(host)
        await self.host.connect(PeerAddress(host.peer_id, (host.maddr,)))
        return host.peer_id

    async def honest(self, data: bytes = DATA) -> tuple[PeerId, BlobServer]:
        servers: list[BlobServer] = []
        store = BlobStore(self.path / f"holder{self._number}")
        store.add_bytes(data)
        peer = await self.holder(lambda host: servers.append(BlobServer(host, store)))
        return peer, servers[0]

    async def _serve(self):
        self._number += 1
        host = self.network.host(Identity(bytes([self._number]) * 32).peer_id, on_fault=self._on_host_fault)
        ready = asyncio.Event()
        self._tasks.append(self._group.create_task(host.serve(ready.set)))
        await ready.wait()
        return host

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _blame(self, peer: PeerId, fault: PeerFault) -> None:
        self.faults.append(peer)

    def _on_host_fault(self, peer: PeerId, fault: PeerFault) -> None:
        self.faults.append(peer)


def run(path: Path, scenario: Callable[[Lab], Awaitable[None]]) -> None:
    async def main() -> None:
        lab = Lab(path)
        async with asyncio.TaskGroup() as group:
            await lab.run(group)
            try:
                await scenario(lab)
            finally:
                lab.stop()

    run_virtual(main())


async def send_chunk(stream: Stream, index: int, data: bytes) -> None:
    """As the wire has it."""
    await write_frame(stream, codec.encode(Chunk(index)))
    await write_frame(stream, data)


def fake(
    offer: bytes, chunk: Callable[[int], bytes | None], *, have: bytes = b"", pause_s: float = 0.0
) -> Callable[[Host], None]:
    """A holder that offers `offer` and answers wishes by `chunk`; None: silence."""

    async def answer(stream: Stream, index: int) -> None:
        await asyncio.sleep(pause_s)
        data = chunk(index)
        if data is None:
            await asyncio.sleep(1000)
        else:
            await send_chunk(stream, index, data)

    async def handle(stream: Stream) -> None:
        ask = codec.decode(await read_frame(stream, 64), Ask)
        await write_frame(stream, codec.encode(BlobOffer(offer, have)))
        for index in range(ask.at_once):
            await answer(stream, index)
        while True:
            wish = codec.decode(await read_frame(stream, 64), Want | Cancel)
            if isinstance(wish, Want):
                await answer(stream, wish.index)

    return lambda host: host.set_handler(PROTOCOL, handle)


def true_chunk(index: int) -> bytes:
    return DATA[index * BLOB_CHUNK_BYTES : (index + 1) * BLOB_CHUNK_BYTES]


def test_a_small_blob_takes_no_buffer_of_a_whole_chunk(tmp_path: Path) -> None:
    async def scenario(lab: Lab) -> None:
        data = random.Random(2).randbytes(20_000)
        peer, _ = await lab.honest(data)
        tracemalloc.start()
        try:
            await lab.fetcher.fetch(manifest_of_bytes(data).id, [peer], CAP)
            assert tracemalloc.get_traced_memory()[1] < BLOB_CHUNK_BYTES // 2
        finally:
            tracemalloc.stop()

    run(tmp_path, scenario)


def test_one_holder_is_enough(tmp_path: Path) -> None:
    async def scenario(lab: Lab) -> None:
        peer, server = await lab.honest()
        path = await lab.fetcher.fetch(BLOB, [peer], CAP)
        assert path.read_bytes() == DATA
        await asyncio.sleep(1)
        assert server.bytes_up == {lab.host.peer_id: len(DATA)}
        assert lab.fetcher.bytes_down == {peer: len(DATA)}
        assert (server.serving, lab.fetcher._locks, lab.faults) == (0, {}, [])
        assert lab.host.statistics().streams_open == 0, "transfers end in good order"
        assert await lab.fetcher.fetch(BLOB, [], CAP) == path

    run(tmp_path, scenario)


@pytest.mark.parametrize("data", [b"", b"small"])
def test_small_blobs(tmp_path: Path, data: bytes) -> None:
    async def scenario(lab: Lab) -> None:
        peer, _ = await lab.honest(data)
        path = await lab.fetcher.fetch(manifest_of_bytes(data).id, [peer], CAP)
        assert path.read_bytes() == data

    run(tmp_path, scenario)


def test_several_holders_share_the_work(tmp_path: Path) -> None:
    async def scenario(lab: Lab) -> None:
        holders = [(await lab.honest())[0] for _ in range(3)]
        await lab.fetcher.fetch(BLOB, holders, CAP)
        assert sum(lab.fetcher.bytes_down.values()) == len(DATA), "nothing is fetched twice"
        assert len(lab.fetcher.bytes_down) == 3

    run(tmp_path, scenario)


def test_chunks_are_asked_for_before_the_first_comes(tmp_path: Path) -> None:
    wishes: list[int] = []

    async def handle(stream: Stream) -> None:
        ask = codec.decode(await read_frame(stream, 64), Ask)
        assert ask.at_once == 1
        await write_frame(stream, codec.encode(BlobOffer(codec.encode(MANIFEST), b"")))
        while True:
            wishes.append(codec.decode(await read_frame(stream, 64), Want).index)

    async def scenario(lab: Lab) -> None:
        peer = await lab.holder(lambda host: host.set_handler(PROTOCOL, handle))
        with pytest.raises(Unreachable, match="stalled"):
            await lab.fetcher.fetch(BLOB, [peer], CAP)
        assert len(wishes) == 1, "one more than the one that comes unasked"

    run(tmp_path, scenario)


async def unasked(stream: Stream) -> None:
    """Sends chunks that nobody requested."""
    await read_frame(stream, 64)
    await write_frame(stream, codec.encode(BlobOffer(codec.encode(MANIFEST), b"")))
    for index in reversed(range(MANIFEST.chunks)):
        await send_chunk(stream, index, true_chunk(index))


async def endless_offer(stream: Stream) -> None:
    """Announces an offer far above what a blob of the legal size needs, and never sends it."""
    await read_frame(stream, 64)
    await stream.write(size_prefix(1 << 20))
    await asyncio.sleep(1000)


LIARS = {
    "chunks that nobody asked for": lambda host: host.set_handler(PROTOCOL, unasked),
    "an offer without end": lambda host: host.set_handler(PROTOCOL, endless_offer),
    "a wrong chunk": fake(codec.encode(MANIFEST), lambda index: true_chunk(index + 1)),
    "a long chunk": fake(codec.encode(MANIFEST), lambda index: bytes(BLOB_CHUNK_BYTES + 1)),
    "a short chunk": fake(codec.encode(MANIFEST), lambda index: b""),
    "another manifest": fake(codec.encode(manifest_of_bytes(b"other")), lambda index: b"other"),
    "no manifest": fake(b"junk", lambda index: b""),
    "a huge manifest": fake(bytes(1 << 20), lambda index: b""),
}


@pytest.mark.parametrize("lie", LIARS)
def test_a_liar_is_blamed_and_the_others_finish(tmp_path: Path, lie: str) -> None:
    async def scenario(lab: Lab) -> None:
        liar = await lab.holder(LIARS[lie])
        honest, _ = await lab.honest()
        assert (await lab.fetcher.fetch(BLOB, [liar, honest], CAP)).read_bytes() == DATA
        assert lab.faults == [liar]

    run(tmp_path, scenario)


@pytest.mark.parametrize("lie", LIARS)
def test_a_lonely_liar_gives_unreachable(tmp_path: Path, lie: str) -> None:
    async def scenario(lab: Lab) -> None:
        liar = await lab.holder(LIARS[lie])
        with pytest.raises(Unreachable, match="from no holder"):
            await lab.fetcher.fetch(BLOB, [liar], CAP)
        assert lab.faults == [liar]
        assert not lab.store.has(BLOB)

    run(tmp_path, scenario)


def test_a_silent_holder_is_given_up_without_blame_and_what_came_is_kept(tmp_path: Path) -> None:
    async def scenario(lab: Lab) -> None:
        sent: list[int] = []

        def five(index: int) -> bytes | None:
            sent.append(index)
            return true_chunk(index) if len(sent) <= 5 else None

        half = await lab.holder(fake(codec.encode(MANIFEST), five))
        with pytest.raises(Unreachable, match="stalled"):
            await lab.fetcher.fetch(BLOB, [half], CAP)
        honest, _ = await lab.honest()
        await lab.fetcher.fetch(BLOB, [honest], CAP)
        came = sum(MANIFEST.chunk_bytes(index) for index in sent[:5])
        assert lab.fetcher.bytes_down == {half: came, honest: len(DATA) - came}, "nothing came twice"
        assert lab.faults == []

    run(tmp_path, scenario)


def test_a_cancelled_download_resumes(tmp_path: Path) -> None:
    async def scenario(lab: Lab) -> None:
        peer, server = await lab.honest()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await lab.fetcher.fetch(BLOB, [peer], CAP)
        assert lab.fetcher.bytes_down[peer] >= BLOB_CHUNK_BYTES
        await asyncio.sleep(10)
        assert server.serving == 0, "a serve ends with its stream"
        frames_bytes = server.wire_bytes_up - server.bytes_up[lab.host.peer_id]
        assert 0 < frames_bytes < 2048, "a part of a chunk counts as what it is"
        lab.store = BlobStore(tmp_path / "own")
        partial = lab.store.begin(MANIFEST)
        left = partial.missing()
        lab.store.suspend(partial)
        assert 0 < len(left) < MANIFEST.chunks
        again = BlobFetcher(lab.host, lab.store, lab._blame)
        assert (await again.fetch(BLOB, [peer], CAP)).read_bytes() == DATA
        assert again.bytes_down[peer] == sum(map(MANIFEST.chunk_bytes, left)), "only what was missing"

    run(tmp_path, scenario)


def test_a_blob_above_its_legal_size_is_refused_before_the_disk_is_touched(tmp_path: Path) -> None:
    async def scenario(lab: Lab) -> None:
        peer, server = await lab.honest()
        with pytest.raises(DecodeError, match="legal"):
            await lab.fetcher.fetch(BLOB, [peer], len(DATA) - 1)
        assert server.bytes_up.total() <= BLOB_CHUNK_BYTES, "the chunk that came unasked"
        assert lab.faults == [], "the holder only holds what its author made"
        assert not list((tmp_path / "own").iterdir())

    run(tmp_path, scenario)


def test_nobody_has_it(tmp_path: Path) -> None:
    async def scenario(lab: Lab) -> None:
        peer, _ = await lab.honest(b"something else")
        stranger = Identity(b"\x77" * 32).peer_id
        with pytest.raises(Unreachable, match="not here") as caught:
            await lab.fetcher.fetch(BLOB, [peer, stranger], CAP)
        assert "not connected" in str(caught.value)
        with pytest.raises(Unreachable, match="nobody holds it"):
            await lab.fetcher.fetch(BLOB, [], CAP)
        assert lab.faults == []

    run(tmp_path, scenario)


def test_one_peer_gets_so_many_streams_and_two_fetches_share_one(tmp_path: Path) -> None:
    async def scenario(lab: Lab) -> None:
        peer, server = await lab.honest()
        streams = [await lab.host.open_stream(peer, PROTOCOL) for _ in range(SERVES_PER_PEER)]
        for stream in streams:
            await write_frame(stream, codec.encode(Ask(BLOB, 0)))
            await read_frame(stream, 1000)
        with pytest.raises(Unreachable, match="busy"):
            await lab.fetcher.fetch(BLOB, [peer], CAP)
        for stream in streams:
            stream.reset()
        await asyncio.sleep(1)
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(lab.fetcher.fetch(BLOB, [peer], CAP))
        assert server.bytes_up == {lab.host.peer_id: len(DATA)}

    run(tmp_path, scenario)


@pytest.mark.parametrize("frames", [[b"junk"], [codec.encode(Ask(BLOB, 0)), codec.encode(Want(99))], [b"x" * 65]])
def test_a_peer_that_breaks_the_wire_is_blamed_and_dropped(tmp_path: Path, frames: list[bytes]) -> None:
    async def scenario(lab: Lab) -> None:
        peer, server = await lab.honest()
        stream = await lab.host.open_stream(peer, PROTOCOL)
        for frame in frames:
            await write_frame(stream, frame)
        await asyncio.sleep(1)
        assert lab.faults == [lab.host.peer_id]
        assert server.serving == 0
        await lab.fetcher.fetch(BLOB, [peer], CAP)

    run(tmp_path, scenario)


def test_a_peer_that_wants_more_than_its_window_is_blamed_and_dropped(tmp_path: Path) -> None:
    async def scenario(lab: Lab) -> None:
        peer, server = await lab.honest()
        stream = await lab.host.open_stream(peer, PROTOCOL)
        await write_frame(stream, codec.encode(Ask(BLOB, 0)))
        await stream.write(framed(codec.encode(Want(0))) * (4 * WINDOW))
        await asyncio.sleep(1)
        assert lab.faults == [lab.host.peer_id]
        assert server.serving == 0

    run(tmp_path, scenario)


def test_a_damaged_holder_is_not_blamed(tmp_path: Path) -> None:
    async def scenario(lab: Lab) -> None:
        peer, _ = await lab.honest()
        path = tmp_path / "holder1" / f"{BLOB.hex()}.blob"
        spoilt = bytearray(path.read_bytes())
        spoilt[5 << 20] ^= 1
        path.write_bytes(spoilt)
        with pytest.raises(Unreachable):
            await lab.fetcher.fetch(BLOB, [peer], CAP)
        assert lab.faults == []

    run(tmp_path, scenario)


@pytest.mark.network
async def test_a_blob_travels_over_p2pd(tmp_path: Path) -> None:
    hosts = [P2pdHost(Identity(bytes([number]) * 32)) for number in (61, 62)]
    stores = [BlobStore(tmp_path / str(number)) for number in range(2)]
    faults: list[PeerId] = []
    async with asyncio.timeout(HANGS_S), asyncio.TaskGroup() as group:
        tasks = []
        for host in hosts:
            ready = asyncio.Event()
            tasks.append(group.create_task(host.serve(ready.set)))
            await ready.wait()
        server = BlobServer(hosts[1], stores[1])
        fetcher = BlobFetcher(hosts[0], stores[0], lambda peer, _: faults.append(peer))
        await hosts[0].connect(PeerAddress(hosts[1].peer_id, await hosts[1].addresses()))
        blob: Digest = stores[1].add_bytes(DATA)
        assert (await fetcher.fetch(blob, [hosts[1].peer_id], CAP)).read_bytes() == DATA
        assert server.bytes_up[hosts[0].peer_id] == len(DATA)
        assert faults == []
        for task in tasks:
            task.cancel()


def test_a_download_says_how_far_it_is_and_how_long_the_rest_takes(tmp_path):
    """What an earlier attempt fetched is here, and is no pace of this one."""
    early = 4

    async def scenario(lab: Lab) -> None:
        assert lab.fetcher.largest() is None
        holder, _ = await lab.honest()
        partial = lab.store.begin(MANIFEST)
        for index in range(early):
            partial.write(index, DATA[index * BLOB_CHUNK_BYTES : (index + 1) * BLOB_CHUNK_BYTES])
        lab.store.suspend(partial)
        clock, seen = asyncio.get_running_loop().time, []

        async def watch() -> None:
            while True:
                if (found := lab.fetcher.largest()) is not None:
                    seen.append((clock(), found))
                await asyncio.sleep(0.005)

        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watch())
            await lab.fetcher.fetch(BLOB, [holder], CAP)
            end_s = clock()
            watching.cancel()
        assert lab.fetcher.largest() is None, "it is over"
        assert {found.of_bytes for _, found in seen} == {len(DATA)}
        assert (seen[0][1].done_bytes, seen[0][1].left_s) == (early * BLOB_CHUNK_BYTES, None)
        done = [found.done_bytes for _, found in seen]
        assert done == sorted(done)
        half = next((at_s, found) for at_s, found in seen if found.done_bytes >= (early + 3) * BLOB_CHUNK_BYTES)
        assert half[1].left_s == pytest.approx(end_s - half[0], rel=0.5)

    run(tmp_path, scenario)
