"""What circuits carry: their bytes count as what is inside, and the relay between the ends reads none of it."""

import asyncio
import random
from datetime import datetime
from pathlib import Path

import pytest

from atoll.p2p.host.framing import read_frame, write_frame
from atoll.p2p.host.interface import Route, Stream
from atoll.p2p.limits.config import LimitsConfig, read_limits
from atoll.p2p.limits.limited_host import LimitedHost
from atoll.p2p.nat.relay import RelayLimits
from atoll.p2p.transports.memory.memory_host import MemoryHost
from atoll.protocols.errors import Unreachable
from atoll.protocols.wires import BLOB, CALLS

CAP = 1 << 22
SLICE = 16
NEXT_MONTH = datetime(2026, 12, 1)


async def echo(stream: Stream) -> None:
    while True:
        await write_frame(stream, await read_frame(stream, CAP))


class Metered:
    """A monthly quota around one host of a world, on a clock that the test sets."""

    def __init__(self, path: Path, monthly: str) -> None:
        self.now = datetime(2026, 11, 20)
        self._path = path
        self._limits = read_limits(LimitsConfig(monthly=monthly))

    def wrap(self, inner: MemoryHost) -> LimitedHost:
        self.host = LimitedHost(inner, self._limits, self._path / "month", local_now=lambda: self.now)
        return self.host

    def is_stopped(self) -> bool:
        return bool(self.host.limits().stopped)


async def symmetric_homes(world, relay=None, home=None) -> None:
    """Relay 1, and the homes 2 and 3 that only it brings together; options of the relay's and of 2's host."""
    await world.host(1, relay=RelayLimits(), **(relay or {}))
    await world.host(2, "symmetric", **(home or {}))
    await world.host(3, "symmetric")
    for number in (2, 3):
        world.hosts[number].set_handler(BLOB.protocol(), echo)
        world.hosts[number].set_handler(CALLS.protocol(), echo)
        await world.meet(number, 1)
    await asyncio.sleep(1)
    await world.meet(2, 3)
    assert (await world.path(2, 3)).path is Route.RELAYED


async def exchange(stream: Stream, data: bytes) -> None:
    await write_frame(stream, data)
    assert await read_frame(stream, CAP) == data


@pytest.mark.parametrize(("opener", "other"), [(2, 3), (3, 2)])
def test_blobs_in_circuits_stop_when_the_month_is_used_up_and_calls_go_on(run_world, tmp_path, opener, other):
    metered = Metered(tmp_path, "1MB")

    async def scenario(world):
        await symmetric_homes(world, home={"wrap": metered.wrap})
        host, peer = world.hosts[opener], world.hosts[other].peer_id
        running = await host.open_stream(peer, BLOB.protocol())
        await exchange(running, bytes(600_000))
        await asyncio.sleep(2)
        assert metered.is_stopped()
        sent = metered.host.statistics().bytes_up
        with pytest.raises(Unreachable):
            await exchange(running, bytes(100_000))
        with pytest.raises(Unreachable):
            await exchange(await host.open_stream(peer, BLOB.protocol()), bytes(100_000))
        assert metered.host.statistics().bytes_up - sent < 20_000, "no part of a blob left the node"
        await exchange(await host.open_stream(peer, CALLS.protocol()), bytes(50_000))
        metered.now = NEXT_MONTH
        await asyncio.sleep(2)
        await exchange(await host.open_stream(peer, BLOB.protocol()), bytes(100_000))

    run_world(scenario)


def test_the_reason_is_named_to_the_node_that_may_not_send(run_world, tmp_path):
    metered = Metered(tmp_path, "1MB")

    async def scenario(world):
        await symmetric_homes(world, home={"wrap": metered.wrap})
        peer = world.hosts[3].peer_id
        await exchange(await world.hosts[2].open_stream(peer, BLOB.protocol()), bytes(600_000))
        await asyncio.sleep(2)
        with pytest.raises(Unreachable, match="monthly quota"):
            await world.hosts[2].open_stream(peer, BLOB.protocol())

    run_world(scenario)


def test_a_relay_whose_month_is_used_up_relays_nothing(run_world, tmp_path):
    metered = Metered(tmp_path, "1MB")

    async def scenario(world):
        await symmetric_homes(world, relay={"wrap": metered.wrap, "is_stopped": metered.is_stopped})
        peer = world.hosts[3].peer_id
        running = await world.hosts[2].open_stream(peer, CALLS.protocol())
        await exchange(running, bytes(300_000))
        await asyncio.sleep(10)
        assert metered.is_stopped()
        with pytest.raises(Unreachable):
            await exchange(running, b"one byte more")
        assert await world.path(2, 3) is None, "the held circuit ended too"
        before = world.hosts[1].routes().relay.bytes_relayed
        with pytest.raises(Unreachable, match="limits"):
            await world.meet(2, 3)
        await asyncio.sleep(60)
        assert world.hosts[1].routes().relay.bytes_relayed == before
        metered.now = NEXT_MONTH
        await asyncio.sleep(2)
        await world.meet(2, 3)
        assert await world.say(2, 3, b"again") == b"again"

    run_world(scenario)


class Recorder:
    """A host of a relay that records every byte of its streams, both ways, one recording for each stream."""

    def __init__(self) -> None:
        self.recordings: list[bytearray] = []

    def wrap(self, inner: MemoryHost) -> MemoryHost:
        open_stream, set_handler = inner.open_stream, inner.set_handler

        async def opened(peer, protocol):
            return Recorded(await open_stream(peer, protocol), self.recordings)

        def recorded(protocol, handler):
            set_handler(protocol, lambda stream: handler(Recorded(stream, self.recordings)))

        inner.open_stream, inner.set_handler = opened, recorded
        return inner


class Recorded:
    """A stream that appends all that it reads to one recording, and all that it writes to another."""

    def __init__(self, inner: Stream, recordings: list[bytearray]) -> None:
        self.peer, self.protocol, self.close, self.reset = inner.peer, inner.protocol, inner.close, inner.reset
        self._inner = inner
        self._read, self._written = bytearray(), bytearray()
        recordings += self._read, self._written

    async def read_exactly(self, size: int) -> bytes:
        data = await self._inner.read_exactly(size)
        self._read += data
        return data

    async def write(self, data: bytes | memoryview) -> None:
        self._written += data
        await self._inner.write(data)


def slices_of(data: bytes) -> set[bytes]:
    """All slices of SLICE bytes, at every offset."""
    return {bytes(data[at : at + SLICE]) for at in range(len(data) - SLICE + 1)}


def test_a_relay_that_records_every_byte_holds_no_plaintext(run_world):
    recorder = Recorder()
    rng = random.Random(13)
    there, back = rng.randbytes(100_000), rng.randbytes(40_000)

    async def answer(stream: Stream) -> None:
        assert await read_frame(stream, CAP) == there
        await write_frame(stream, back)
        await stream.read_exactly(1)

    async def scenario(world):
        await symmetric_homes(world, relay={"wrap": recorder.wrap})
        world.hosts[3].set_handler("/test/answer/1", answer)
        stream = await world.hosts[2].open_stream(world.hosts[3].peer_id, "/test/answer/1")
        await write_frame(stream, there)
        assert await read_frame(stream, CAP) == back
        stream.reset()

    run_world(scenario)
    assert sum(map(len, recorder.recordings)) > 2 * (len(there) + len(back)), "all of it went through the relay"
    secret = slices_of(there) | slices_of(back)
    for recording in recorder.recordings:
        assert not secret & slices_of(recording)
        assert b"/test/answer/1" not in recording, "the relay does not know the protocol either"
