"""Hosts under limits on virtual time: caps, classes, fairness, schedule, quota."""

import asyncio
import statistics
from datetime import datetime
from pathlib import Path

import pytest

from atoll.p2p.blobs.fetch import Blobs
from atoll.p2p.blobs.store import BlobStore
from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.limits.config import GivenRates, LimitsConfig, Window, read_limits
from atoll.p2p.limits.limited_host import LimitedHost, traffic_of
from atoll.p2p.limits.monthly_quota import SURE_S, load_month
from atoll.p2p.limits.pacer import WIRE_OVERHEAD
from atoll.p2p.transports.memory.memory_network import MemoryNetwork
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.errors import ConfigError, LocalFault, Unreachable
from atoll.protocols.identity import Identity

CALLS, NEWS, BULK = "/atoll/calls/1", "/atoll/gossip/1", "/atoll/blob/9"
CAP = LimitsConfig(up="5mbit")
CAP_BYTES_S = 5e6 / 8
NOON = datetime(2026, 11, 23, 12)


class Lab:
    """One host under limits and some without, all connected to it."""

    def __init__(self, path: Path, config: LimitsConfig) -> None:
        self.path = path
        self.now = NOON
        self._limits = read_limits(config)
        self._network = MemoryNetwork(seed=2, latency_s=0.01, bandwidth_bps=1e9)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, group: asyncio.TaskGroup, others: int) -> None:
        self.group = group
        inner = self._network.host(Identity(b"\x01" * 32).peer_id)
        self.host = LimitedHost(inner, self._limits, self.path / "month", local_now=lambda: self.now)
        self.others = [self._network.host(Identity(bytes([n + 2]) * 32).peer_id) for n in range(others)]
        for host in (self.host, *self.others):
            ready = asyncio.Event()
            self._tasks.append(group.create_task(host.serve(ready.set)))
            await ready.wait()
            host.set_handler(CALLS, echo)
            host.set_handler(NEWS, swallow)
            host.set_handler(BULK, swallow)
        for other in self.others:
            await self.host.connect(PeerAddress(other.peer_id, await other.addresses()))

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def pour(self, other: int, protocol: str = BULK, part: int = 200_000) -> None:
        """Send for ever."""
        stream = await self.host.open_stream(self.others[other].peer_id, protocol)
        while True:
            await stream.write(bytes(part))

    def spawn(self, work) -> None:
        self._tasks.append(self.group.create_task(work))


async def echo(stream) -> None:
    while True:
        await stream.write(await stream.read_exactly(100))


async def swallow(stream) -> None:
    while True:
        await stream.read_exactly(1000)


def run(path: Path, scenario, config: LimitsConfig = CAP, others: int = 2) -> None:
    async def main() -> None:
        lab = Lab(path, config)
        async with asyncio.TaskGroup() as group:
            await lab.start(group, others)
            try:
                await scenario(lab)
            finally:
                lab.stop()

    run_virtual(main())


async def samples(lab: Lab, seconds: float) -> list[float]:
    """Bytes sent so far, as they are on the wire, every 0.1 s."""
    taken = []
    for _ in range(round(seconds * 10)):
        taken.append(lab.host.statistics().bytes_up * WIRE_OVERHEAD)
        await asyncio.sleep(0.1)
    return taken


def highest_rate(sent: list[float], window_s: float) -> float:
    step = round(window_s * 10)
    return max(sent[at + step] - sent[at] for at in range(len(sent) - step)) / window_s


def test_ten_seconds_never_exceed_the_cap(tmp_path: Path) -> None:
    async def scenario(lab: Lab) -> None:
        await asyncio.sleep(5)  # a full bucket
        lab.spawn(lab.pour(0))
        lab.spawn(lab.pour(1))
        lab.spawn(lab.pour(1, NEWS, part=1500))
        sent = await samples(lab, 40)
        assert highest_rate(sent, 10) <= 1.05 * CAP_BYTES_S
        assert (sent[-1] - sent[0]) / 39.9 > 0.95 * CAP_BYTES_S, "control and bulk use all of it"

    run(tmp_path, scenario)


def test_bulk_alone_leaves_room(tmp_path: Path) -> None:
    async def scenario(lab: Lab) -> None:
        lab.spawn(lab.pour(0))
        sent = await samples(lab, 30)
        assert 0.8 * CAP_BYTES_S < (sent[-1] - sent[0]) / 29.9 < 0.88 * CAP_BYTES_S

    run(tmp_path, scenario)


def test_calls_stay_quick_beside_bulk(tmp_path: Path) -> None:
    async def scenario(lab: Lab) -> None:
        for other in (0, 1, 1, 1):
            lab.spawn(lab.pour(other))
        await asyncio.sleep(5)
        loop, took_s = asyncio.get_running_loop(), []
        stream = await lab.host.open_stream(lab.others[0].peer_id, CALLS)
        for _ in range(100):
            begin_s = loop.time()
            await stream.write(bytes(100))
            await stream.read_exactly(100)
            took_s.append(loop.time() - begin_s)
            await asyncio.sleep(0.05)
        assert statistics.median(took_s) < 0.025, "the round trip takes 20 ms"
        assert max(took_s) < 0.1

    run(tmp_path, scenario)


def test_the_download_is_capped(tmp_path: Path) -> None:
    async def scenario(lab: Lab) -> None:
        async def send() -> None:
            stream = await lab.others[0].open_stream(lab.host.peer_id, BULK)
            while True:
                await stream.write(bytes(100_000))

        lab.spawn(send())
        await asyncio.sleep(5)
        first = lab.host.statistics().bytes_down
        await asyncio.sleep(20)
        rate = (lab.host.statistics().bytes_down - first) / 20 * WIRE_OVERHEAD
        assert 0.8 * 1e6 < rate < 0.88 * 1e6

    run(tmp_path, scenario, LimitsConfig(down="8mbit"))


def test_takers_of_blobs_share_the_upload_however_much_they_ask_for(tmp_path: Path) -> None:
    async def scenario(lab: Lab) -> None:
        store = BlobStore(tmp_path / "blobs")
        blobs = [store.add_bytes(bytes([number]) * (6 << 20)) for number in range(4)]
        server = Blobs(lab.host, store, lambda peer, fault: None)
        takers = []
        for number, other in enumerate(lab.others):
            takers.append(Blobs(other, BlobStore(tmp_path / f"taker{number}"), lambda peer, fault: None))
        for blob in blobs[:3]:
            lab.spawn(fetch(takers[0], blob))
        lab.spawn(fetch(takers[1], blobs[3]))
        lab.spawn(fetch(takers[2], blobs[3]))
        await asyncio.sleep(20)
        got = [server.bytes_of(other.peer_id)[0] for other in lab.others]
        assert max(got) - min(got) <= 1 << 20, got
        assert min(got) >= 2 << 20

    async def fetch(blobs: Blobs, blob) -> None:
        await blobs.fetch(blob, [Identity(b"\x01" * 32).peer_id], 8 << 20)

    run(tmp_path, scenario, others=3)


def test_the_schedule_is_followed_without_a_restart(tmp_path: Path) -> None:
    night = Window(from_="22:00", to="06:00")
    work = Window(from_="13:00", to="14:00", up="off")

    async def scenario(lab: Lab) -> None:
        lab.spawn(lab.pour(0))
        await asyncio.sleep(5)
        assert lab.host.limits().up_bytes_s == CAP_BYTES_S
        lab.now = NOON.replace(hour=23)
        await asyncio.sleep(2)
        assert lab.host.limits().up_bytes_s is None
        first = lab.host.statistics().bytes_up
        await asyncio.sleep(2)
        assert lab.host.statistics().bytes_up - first > 20 * CAP_BYTES_S, "who waited goes on at full speed"
        lab.now = NOON
        await asyncio.sleep(2)
        first = lab.host.statistics().bytes_up
        await asyncio.sleep(2)
        assert lab.host.statistics().bytes_up - first < 2 * CAP_BYTES_S

    run(tmp_path, scenario, LimitsConfig(up="5mbit", schedule=[night, work]))


@pytest.mark.parametrize("others_at_work", [False, True])
def test_bulk_that_is_off_says_why_and_calls_go_on(tmp_path: Path, others_at_work: bool) -> None:
    work = Window(from_="13:00", to="14:00", up="off")

    async def scenario(lab: Lab) -> None:
        peer = lab.others[0].peer_id
        running = await lab.host.open_stream(peer, BULK)
        lab.now = NOON.replace(hour=13)
        await asyncio.sleep(2)
        if others_at_work:
            stream = await lab.others[0].open_stream(lab.host.peer_id, BULK)
            with pytest.raises(Unreachable):
                await stream.read_exactly(1)
        for attempt in (lab.host.open_stream(peer, BULK), running.write(b"x"), running.read_exactly(1)):
            with pytest.raises(Unreachable, match="off from 13:00 to 14:00"):
                await attempt
        assert "14:00" in lab.host.limits().stopped
        calls = await lab.host.open_stream(peer, CALLS)
        await calls.write(bytes(100))
        assert await calls.read_exactly(100) == bytes(100)
        lab.now = NOON.replace(hour=14)
        await asyncio.sleep(2)
        assert lab.host.limits().stopped == ""
        await lab.host.open_stream(peer, BULK)

    run(tmp_path, scenario, LimitsConfig(schedule=[work]))


def test_a_writer_that_waits_is_told_when_bulk_stops(tmp_path: Path) -> None:
    work = Window(from_="13:00", to="14:00", up="off")

    async def scenario(lab: Lab) -> None:
        stream = await lab.host.open_stream(lab.others[0].peer_id, BULK)

        async def write() -> None:
            with pytest.raises(Unreachable, match="off from"):
                await stream.write(bytes(100_000_000))

        async with asyncio.TaskGroup() as group:
            group.create_task(write())
            await asyncio.sleep(3)
            lab.now = NOON.replace(hour=13)

    run(tmp_path, scenario, LimitsConfig(up="64kbit", schedule=[work]))


def test_the_month_is_counted_over_restarts_and_its_end_is_known(tmp_path: Path) -> None:
    quota = LimitsConfig(monthly="5MB", monthly_start_day=15)

    async def first(lab: Lab) -> None:
        stream = await lab.host.open_stream(lab.others[0].peer_id, BULK)
        await stream.write(bytes(3_000_000))
        await asyncio.sleep(2)
        assert lab.host.limits().month_up_bytes == 3_000_000 * WIRE_OVERHEAD
        assert lab.host.limits().stopped == ""

    async def second(lab: Lab) -> None:
        assert lab.host.limits().month_up_bytes == 3_000_000 * WIRE_OVERHEAD
        stream = await lab.host.open_stream(lab.others[0].peer_id, BULK)
        await stream.write(bytes(2_000_000))
        await asyncio.sleep(2)
        state = lab.host.limits()
        assert "5 MB" in state.stopped or "0.005 GB" in state.stopped
        assert "2026-12-15" in state.stopped
        assert state.month_ends == "2026-12-15"
        with pytest.raises(Unreachable, match="until 2026-12-15"):
            await lab.host.open_stream(lab.others[0].peer_id, BULK)
        lab.now = datetime(2026, 12, 15)
        await asyncio.sleep(2)
        await lab.host.open_stream(lab.others[0].peer_id, BULK)

    run(tmp_path, first, quota)
    assert load_month(tmp_path / "month", NOON.date(), 15).up_bytes == 3_000_000 * WIRE_OVERHEAD
    run(tmp_path, second, quota)


def test_one_look_at_a_clock_that_is_years_ahead_ends_no_month(tmp_path: Path) -> None:
    async def scenario(lab: Lab) -> None:
        await asyncio.sleep(2 * SURE_S)
        lab.now = datetime(2036, 2, 7)
        await asyncio.sleep(60)
        assert lab.host.limits().month_ends == "2026-12-01"
        lab.now = NOON
        await asyncio.sleep(2)
        assert lab.host.limits().month_ends == "2026-12-01"
        lab.now = datetime(2027, 3, 7)  # the machine slept
        await asyncio.sleep(SURE_S + 2)
        assert lab.host.limits().month_ends == "2027-04-01"

    run(tmp_path, scenario, others=0)


def test_a_kill_costs_a_minute_of_the_count(tmp_path: Path) -> None:
    async def scenario(lab: Lab) -> None:
        lab.spawn(lab.pour(0))
        await asyncio.sleep(125)
        saved = load_month(tmp_path / "month", NOON.date(), 1)
        assert saved.up_bytes >= 0.8 * lab.host.limits().month_up_bytes * 120 / 125 * 0.9

    run(tmp_path, scenario)


def test_a_limit_that_the_user_sets_holds_for_open_streams_until_it_is_taken_back(tmp_path: Path) -> None:
    async def rate(lab: Lab) -> float:
        first = lab.host.statistics().bytes_up
        await asyncio.sleep(5)
        return (lab.host.statistics().bytes_up - first) / 5 * WIRE_OVERHEAD

    async def scenario(lab: Lab) -> None:
        lab.spawn(lab.pour(0))
        lab.spawn(lab.pour(1, NEWS))
        free = await rate(lab)
        assert free > 20 * CAP_BYTES_S
        lab.host.set_rates(GivenRates(up="5mbit"))
        assert lab.host.limits().up_bytes_s == CAP_BYTES_S
        await asyncio.sleep(1)
        assert await rate(lab) <= 1.05 * CAP_BYTES_S
        with pytest.raises(ConfigError, match="cannot be read"):
            lab.host.set_rates(GivenRates(up="fast"))
        assert lab.host.limits().up_bytes_s == CAP_BYTES_S
        lab.host.set_rates(GivenRates())
        assert await rate(lab) > 0.9 * free

    run(tmp_path, scenario, LimitsConfig())


def test_the_schedule_does_not_end_what_the_user_set(tmp_path: Path) -> None:
    night = Window(from_="22:00", to="06:00", up="8mbit", down="8mbit")

    async def scenario(lab: Lab) -> None:
        lab.host.set_rates(GivenRates(up="5mbit"))
        lab.now = NOON.replace(hour=23)
        await asyncio.sleep(2)
        assert (lab.host.limits().up_bytes_s, lab.host.limits().down_bytes_s) == (CAP_BYTES_S, 1e6)

    run(tmp_path, scenario, LimitsConfig(schedule=[night]))


def test_without_a_limit_nothing_waits(tmp_path: Path) -> None:
    async def scenario(lab: Lab) -> None:
        stream = await lab.host.open_stream(lab.others[0].peer_id, CALLS)
        begin_s = asyncio.get_running_loop().time()
        await stream.write(bytes(100))
        await stream.read_exactly(100)
        took_s = asyncio.get_running_loop().time() - begin_s
        assert took_s == pytest.approx(0.02, abs=1e-4), "the path's round trip"

    run(tmp_path, scenario, LimitsConfig())


def test_a_disk_that_fails_costs_the_count_not_the_network(tmp_path: Path, caplog) -> None:
    async def scenario(lab: Lab) -> None:
        lab.spawn(lab.pour(0))
        (tmp_path / "month").mkdir()
        await asyncio.sleep(130)
        assert lab.host.statistics().bytes_up > 50e6

    run(tmp_path, scenario)
    assert "not saved" in caplog.text


def test_a_host_that_cannot_start_says_so_itself(tmp_path: Path) -> None:
    async def broken(ready) -> None:
        raise LocalFault("port in use")

    async def main() -> None:
        inner = MemoryNetwork().host(Identity(b"\x05" * 32).peer_id)
        inner.serve = broken
        host = LimitedHost(inner, read_limits(CAP), tmp_path / "month")
        with pytest.raises(LocalFault, match="port in use"):
            await host.serve(lambda: None)

    run_virtual(main())


def test_blobs_are_bulk() -> None:
    assert traffic_of("/atoll/blob/2") > traffic_of("/atoll/calls/1")
