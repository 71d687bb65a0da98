"""Small blobs that come unasked: who gets them, what waits, and what is never taken for more than it is."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from atoll.p2p.blobs import pushed as pushing
from atoll.p2p.blobs.fetch import Blobs
from atoll.p2p.blobs.pushed import PUSHED_MAX_BYTES, WAITING_EACH, PushedBlobs
from atoll.p2p.blobs.store import BlobStore
from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.rpc.calls import Calls
from atoll.p2p.transports.memory.memory_network import MemoryNetwork
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.blobs import manifest_of_bytes
from atoll.protocols.errors import DecodeError
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Digest, PeerId, Round, RunId, digest
from atoll.protocols.ledger.records import Contribution

RUN = RunId(b"r" * 32)


class Side:
    """One node's blobs, and the calls that carry pushed ones."""

    def __init__(self, network: MemoryNetwork, folder: Path, number: int) -> None:
        self.faults: list[PeerId] = []
        self.host = network.host(Identity(bytes([number]) * 32).peer_id, on_fault=self._blame)
        self.calls = Calls(self.host, RUN, on_fault=self._blame)
        self.store = BlobStore(folder / str(number))
        self.blobs = Blobs(self.host, self.store, self._blame)
        self.pushed = PushedBlobs(self.calls, self.blobs, asyncio.get_running_loop().time)

    def add(self, size: int, seed: int = 0) -> Digest:
        return self.store.add_bytes(random.Random(seed).randbytes(size))

    def send(self, blob: Digest, other: "Side") -> None:
        """As the payload of a contribution."""
        self.pushed.send_payload_of(
            Contribution(Round(0), digest(b"base"), blob, 8, 1000, 64, 4.0), lambda: [other.host.peer_id]
        )

    def _blame(self, peer: PeerId, fault: object) -> None:
        self.faults.append(peer)


def run(folder: Path, scenario: Callable[[Side, Side], Awaitable[None]], **quality: float) -> None:
    async def main() -> None:
        network = MemoryNetwork(seed=1, **({"latency_s": 0.03} | quality))
        async with asyncio.TaskGroup() as group:
            sides = [Side(network, folder, number) for number in (1, 2)]
            tasks = []
            for side in sides:
                ready = asyncio.Event()
                tasks.append(group.create_task(side.host.serve(ready.set)))
                tasks.append(group.create_task(side.calls.serve()))
                await ready.wait()
                await side.calls.started.wait()
            here, there = sides
            await here.host.connect(PeerAddress(there.host.peer_id, (there.host.maddr,)))
            await scenario(here, there)
            assert not [*here.faults, *there.faults]
            for task in tasks:
                task.cancel()

    run_virtual(main())


def test_what_came_is_stored_under_its_name_when_it_is_wanted(tmp_path: Path) -> None:
    async def scenario(here: Side, there: Side) -> None:
        blob = here.add(20_000)
        here.send(blob, there)
        await asyncio.sleep(1)
        assert not there.store.has(blob), "nothing is stored before somebody wants it"
        path = await there.pushed.take(blob, 20_000)
        assert path is not None
        assert manifest_of_bytes(path.read_bytes()).id == blob
        assert await there.pushed.take(blob, 20_000) is None, "it waits once"
        assert here.blobs.bytes_of(there.host.peer_id) == (20_000, 0)
        assert there.blobs.bytes_of(here.host.peer_id) == (0, 20_000)
        assert here.blobs.statistics().wire_bytes_up == 20_000

    run(tmp_path, scenario)


def test_a_large_blob_is_not_sent(tmp_path: Path) -> None:
    async def scenario(here: Side, there: Side) -> None:
        large, largest = here.add(PUSHED_MAX_BYTES + 1), here.add(PUSHED_MAX_BYTES)
        for blob in (large, largest):
            here.send(blob, there)
        await asyncio.sleep(1)
        assert await there.pushed.take(large, 1 << 20) is None
        assert await there.pushed.take(largest, 1 << 20) is not None

    run(tmp_path, scenario)


def test_what_is_larger_than_legal_is_not_stored(tmp_path: Path) -> None:
    async def scenario(here: Side, there: Side) -> None:
        blob = here.add(1000)
        here.send(blob, there)
        await asyncio.sleep(1)
        with pytest.raises(DecodeError, match="1000 bytes where at most 999 are legal"):
            await there.pushed.take(blob, 999)
        assert not there.store.has(blob)

    run(tmp_path, scenario)


def test_of_one_sender_few_wait_and_of_all_a_bounded_size(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(pushing, "WAITING_BYTES", 250)

    async def scenario(here: Side, there: Side) -> None:
        blobs = [here.add(10, seed) for seed in range(WAITING_EACH + 1)]
        for blob in blobs:
            here.send(blob, there)
        await asyncio.sleep(1)
        assert await there.pushed.take(blobs[0], 10) is None, "the oldest made room"
        assert await there.pushed.take(blobs[1], 10) is not None
        big = [here.add(100, seed) for seed in range(3)]
        for blob in big:
            here.send(blob, there)
        await asyncio.sleep(1)
        assert [await there.pushed.take(blob, 100) is not None for blob in big] == [False, True, True]
        assert there.pushed._bytes == sum(len(waiting.data) for waiting in there.pushed._waiting.values())

    run(tmp_path, scenario)


def test_a_flood_of_one_peer_is_not_looked_at(tmp_path: Path) -> None:
    async def scenario(here: Side, there: Side) -> None:
        blobs = [here.add(10, seed) for seed in range(60)]
        for blob in blobs:
            here.send(blob, there)
        await asyncio.sleep(0.5)
        assert await there.pushed.take(blobs[-1], 10) is None

    run(tmp_path, scenario)


def test_nothing_is_kept_of_whom_it_refuses_nor_of_what_it_has(tmp_path: Path) -> None:
    async def scenario(here: Side, there: Side) -> None:
        blob, known = here.add(10, 1), here.add(10, 2)
        there.add(10, 2)
        here.send(known, there)
        await asyncio.sleep(1)
        assert await there.pushed.take(known, 10) is None
        there.blobs.refuse(here.host.peer_id)
        here.send(blob, there)
        await asyncio.sleep(1)
        assert await there.pushed.take(blob, 10) is None

    run(tmp_path, scenario)
