"""Who is served where more streams ask than there are places: strangers cost nothing, and keep nobody out."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from atoll.p2p.blobs.fetch import Blobs
from atoll.p2p.blobs.frames import PROTOCOL, Ask, BlobOffer, BlobRefusal, Want
from atoll.p2p.blobs.server import (
    ASK_S,
    COUNTED_PEERS,
    FOR_NEWCOMERS,
    RESTING_S,
    SERVES_AT_ONCE,
    SERVES_PER_PEER,
    SLOW_BPS,
    BlobServer,
)
from atoll.p2p.blobs.store import BlobStore
from atoll.p2p.host.framing import read_frame, write_frame
from atoll.p2p.host.interface import PeerAddress, Stream
from atoll.p2p.transports.memory.memory_network import MemoryHost, MemoryNetwork
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols import codec
from atoll.protocols.blobs import BLOB_CHUNK_BYTES, manifest_of_bytes
from atoll.protocols.errors import Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId

CHUNKS = 5
DATA = random.Random(3).randbytes(CHUNKS * BLOB_CHUNK_BYTES)
BLOB = manifest_of_bytes(DATA).id


class Lab:
    """One server of a blob, and hosts that open streams to it."""

    def __init__(self, path: Path, bandwidth_bps: float) -> None:
        self.network = MemoryNetwork(seed=1, latency_s=0.01, bandwidth_bps=bandwidth_bps)
        self.path = path
        self.tasks: list[asyncio.Task[None]] = []

    async def host(self, number: int) -> MemoryHost:
        host = self.network.host(Identity(number.to_bytes(32, "big")).peer_id)
        ready = asyncio.Event()
        self.tasks.append(self.group.create_task(host.serve(ready.set)))
        await ready.wait()
        return host

    async def begin(self, group: asyncio.TaskGroup) -> None:
        self.group = group
        self.holder = await self.host(1)
        store = BlobStore(self.path / "blobs")
        store.add_bytes(DATA)
        self.server = BlobServer(self.holder, store)

    async def peer(self, number: int) -> MemoryHost:
        host = await self.host(number)
        await host.connect(PeerAddress(self.holder.peer_id, (self.holder.maddr,)))
        return host

    async def ask(self, host: MemoryHost) -> tuple[Stream, BlobOffer | BlobRefusal]:
        stream = await host.open_stream(self.holder.peer_id, PROTOCOL)
        await write_frame(stream, codec.encode(Ask(BLOB, 0)))
        return stream, codec.decode(await read_frame(stream, 1 << 16), BlobOffer | BlobRefusal)

    async def fill(self, *, read: bool = False) -> list[Stream]:
        """Strangers take all places; with `read` each wants chunks, which a slow line brings."""
        streams = []
        for number in range(SERVES_AT_ONCE):
            stream, answer = await self.ask(await self.peer(100 + number))
            assert isinstance(answer, BlobOffer)
            if read:
                for index in range(3):
                    await write_frame(stream, codec.encode(Want(index)))
            streams.append(stream)
        return streams


def played(path: Path, story: Callable[[Lab], Awaitable[None]], bandwidth_bps: float = 200e6) -> None:
    async def main() -> None:
        lab = Lab(path, bandwidth_bps)
        async with asyncio.TaskGroup() as group:
            await lab.begin(group)
            await story(lab)
            for task in lab.tasks:
                task.cancel()

    run_virtual(main())


def test_streams_that_ask_for_nothing_have_no_place(tmp_path: Path) -> None:
    """Eight strangers with four silent streams each kept a payload from everybody for as long as they liked."""

    async def story(lab: Lab) -> None:
        silent = []
        for number in range(8):
            host = await lab.peer(100 + number)
            silent += [await host.open_stream(lab.holder.peer_id, PROTOCOL) for _ in range(SERVES_PER_PEER)]
        await asyncio.sleep(1)
        _, answer = await lab.ask(await lab.peer(2))
        assert isinstance(answer, BlobOffer)
        await asyncio.sleep(ASK_S + 1)
        for stream in silent:
            with pytest.raises(Unreachable):
                async with asyncio.timeout(1):
                    await read_frame(stream, 1 << 16)

    played(tmp_path, story)


def test_a_peer_with_many_places_gives_one_to_a_peer_that_has_none(tmp_path: Path) -> None:
    async def story(lab: Lab) -> None:
        for number in range(SERVES_AT_ONCE // SERVES_PER_PEER):
            host = await lab.peer(100 + number)
            assert all([isinstance((await lab.ask(host))[1], BlobOffer) for _ in range(SERVES_PER_PEER)])
        assert isinstance((await lab.ask(host))[1], BlobRefusal), "no more than its share"
        _, answer = await lab.ask(await lab.peer(2))
        assert isinstance(answer, BlobOffer)
        assert lab.server.serving == SERVES_AT_ONCE

    played(tmp_path, story)


def test_a_stream_that_rests_gives_way_and_one_that_is_read_does_not(tmp_path: Path) -> None:
    async def story(lab: Lab) -> None:
        await lab.fill()
        host = await lab.peer(2)
        assert isinstance((await lab.ask(host))[1], BlobRefusal), "they have just come"
        await asyncio.sleep(RESTING_S)
        assert isinstance((await lab.ask(host))[1], BlobOffer)

    played(tmp_path, story)

    async def slow(lab: Lab) -> None:
        await lab.fill(read=True)
        await asyncio.sleep(RESTING_S)
        assert isinstance((await lab.ask(await lab.peer(2)))[1], BlobRefusal), "a slow line is no rest"

    played(tmp_path / "slow", slow, bandwidth_bps=2e5)


def test_strangers_give_way_to_members(tmp_path: Path) -> None:
    """Read slowly, a place is never at rest; thirty-three strangers would keep all members from a payload."""

    async def story(lab: Lab) -> None:
        await lab.fill()
        members: set[PeerId] = set()
        lab.server.is_accepted = members.__contains__
        host = await lab.peer(2)
        members.add(host.peer_id)
        assert isinstance((await lab.ask(host))[1], BlobOffer)
        stranger = await lab.peer(3)
        assert isinstance((await lab.ask(stranger))[1], BlobRefusal)

    played(tmp_path, story)


async def read_at(stream: Stream, bytes_s: int) -> None:
    """Take so many bytes in each second, as long as the stream is served."""
    try:
        while True:
            await asyncio.gather(stream.read_exactly(bytes_s), asyncio.sleep(1))
    except Unreachable:
        pass


async def fill_slowly(lab: Lab, bytes_s: int) -> list[MemoryHost]:
    """Strangers take all places, want all chunks and read so many bytes a second."""
    hosts = [await lab.peer(100 + number) for number in range(SERVES_AT_ONCE)]
    for host in hosts:
        stream, answer = await lab.ask(host)
        assert isinstance(answer, BlobOffer)
        for index in range(CHUNKS):
            await write_frame(stream, codec.encode(Want(index)))
        lab.tasks.append(lab.group.create_task(read_at(stream, bytes_s)))
    return hosts


def test_strangers_that_read_slowly_give_way_and_take_no_place_back(tmp_path: Path) -> None:
    """Thirty-three of them kept each newcomer from a snapshot: they neither rest nor have two places."""

    async def story(lab: Lab) -> None:
        slow = await fill_slowly(lab, SLOW_BPS // 4)
        host = await lab.peer(2)
        assert isinstance((await lab.ask(host))[1], BlobRefusal), "each has one whole chunk first"
        await asyncio.sleep(2 * BLOB_CHUNK_BYTES / SLOW_BPS + 1)
        stream, answer = await lab.ask(host)
        assert isinstance(answer, BlobOffer)
        for index in range(CHUNKS):
            await write_frame(stream, codec.encode(Want(index)))
        served = {each.peer for each in lab.server._places}
        ended = [one for one in slow if one.peer_id not in served]
        assert len(ended) == 1
        assert isinstance((await lab.ask(ended[0]))[1], BlobRefusal), "it ends no other for a while"
        assert isinstance((await lab.ask(await lab.peer(3)))[1], BlobOffer)
        async with asyncio.timeout(10):
            await stream.read_exactly(CHUNKS * BLOB_CHUNK_BYTES)

    played(tmp_path, story)


def test_strangers_that_read_fast_enough_keep_their_places(tmp_path: Path) -> None:
    async def story(lab: Lab) -> None:
        await fill_slowly(lab, SLOW_BPS * 5 // 4)
        host = await lab.peer(2)
        for _ in range(7):
            await asyncio.sleep(10)
            assert isinstance((await lab.ask(host))[1], BlobRefusal)

    played(tmp_path, story)


def test_a_slow_member_gives_way_to_no_stranger(tmp_path: Path) -> None:
    async def story(lab: Lab) -> None:
        members = {host.peer_id for host in await fill_slowly(lab, SLOW_BPS // 4)}
        lab.server.is_accepted = members.__contains__
        await asyncio.sleep(2 * BLOB_CHUNK_BYTES / SLOW_BPS + 1)
        assert isinstance((await lab.ask(await lab.peer(2)))[1], BlobRefusal)
        members.add((host := await lab.peer(3)).peer_id)
        assert isinstance((await lab.ask(host))[1], BlobOffer), "members take turns"

    played(tmp_path, story)


def test_members_leave_places_for_newcomers(tmp_path: Path) -> None:
    """Forty members that ask one holder without rest kept a newcomer from its snapshot."""

    async def story(lab: Lab) -> None:
        members: set[PeerId] = set()
        lab.server.is_accepted = members.__contains__
        answers = []
        for number in range(SERVES_AT_ONCE):
            host = await lab.peer(100 + number)
            members.add(host.peer_id)
            answers.append(isinstance((await lab.ask(host))[1], BlobOffer))
        assert answers == [True] * (SERVES_AT_ONCE - FOR_NEWCOMERS) + [False] * FOR_NEWCOMERS
        newcomers = [(await lab.ask(await lab.peer(10 + number)))[1] for number in range(FOR_NEWCOMERS + 1)]
        assert [isinstance(one, BlobOffer) for one in newcomers] == [True] * FOR_NEWCOMERS + [False]
        assert isinstance((await lab.ask(host))[1], BlobRefusal), "nor does a member end a newcomer's"

    played(tmp_path, story)


def test_keys_that_come_and_go_are_forgotten_and_their_bytes_still_count(tmp_path: Path) -> None:
    """Each key that ever took a byte stayed in the table of bytes until the node ended."""

    async def story(lab: Lab) -> None:
        blobs = Blobs(lab.holder, BlobStore(tmp_path / "pushed"), lambda peer, fault: None)
        for number in range(2 * COUNTED_PEERS):
            blobs.count_pushed(PeerId(f"made-up-{number}"), up_bytes=3, down_bytes=2)
            blobs.count_pushed(lab.holder.peer_id, up_bytes=1)
        assert blobs.bytes_of(lab.holder.peer_id) == (2 * COUNTED_PEERS, 0), "who goes on stays"
        assert blobs.bytes_of(PeerId(f"made-up-{2 * COUNTED_PEERS - 1}")) == (3, 2)
        assert blobs.bytes_of(PeerId("made-up-0")) == (0, 0)
        totals = blobs.statistics()
        assert (totals.bytes_up, totals.bytes_down) == (8 * COUNTED_PEERS, 4 * COUNTED_PEERS)

    played(tmp_path, story)
