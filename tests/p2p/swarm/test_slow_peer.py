"""A peer that sends, reads and answers a byte at a time is borne for a bounded time, and holds up nobody else."""

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from atoll.p2p.blobs.fetch import STALL_S, BlobFetcher
from atoll.p2p.blobs.frames import PROTOCOL
from atoll.p2p.blobs.server import IDLE_S, BlobServer
from atoll.p2p.blobs.store import BlobStore
from atoll.p2p.host.framing import PART_S, framed
from atoll.p2p.host.interface import Host, Stream
from atoll.p2p.membership.liveness import EVERY_S, SILENCE_S, STRIKES, LivenessMonitor
from atoll.p2p.rpc import call_stream, calls, frames, outbox, server, single_request
from atoll.p2p.rpc.call_stream import HELLO_S
from atoll.p2p.rpc.calls import Calls
from atoll.p2p.rpc.single_request import AT_ONCE, REQUEST_S, SingleRequests
from atoll.p2p.swarm.run_fetch import serve_run
from atoll.p2p.transports.host_base import LINGER_S, STREAMS_PER_PEER
from atoll.protocols import codec
from atoll.protocols.errors import Unreachable
from atoll.protocols.ids import RunId
from atoll.protocols.wires import RUN as RUN_WIRE
from tests.golden.__main__ import recorded
from tests.p2p.conftest import address_of
from tests.p2p.swarm.slow_peer import SlowPeer, streams_of

RUN = RunId(b"\x11" * 32)
SINGLE = "/test/rows/1"
DATA = random.Random(1).randbytes(8 << 20)
"""An answer: more than all buffers of a transport on the way hold."""


class Deadlines(NamedTuple):
    """Seconds after which a member has ended a stream of the slow peer."""

    hello: float
    part: float
    request: float
    idle: float

    def of(self, protocol: str) -> float:
        """The latest of what ends the streams of a protocol (`SlowPeer.kinds`)."""
        # A request for a blob is so short that it comes in time; then its answer is not read.
        longest = {frames.PROTOCOL: self.part, SINGLE: self.part + self.request, PROTOCOL: 2 * self.idle}
        return longest.get(protocol, HELLO_S)


SHIPPED = Deadlines(HELLO_S, PART_S, REQUEST_S, IDLE_S)
SHORT = Deadlines(1.0, 2.0, 2.0, 2.0)
LATE_S = {"memory": LINGER_S + 5.0, "p2pd": 100.0}
"""The end of a stream may wait for the other side, and buffers fill first; a busy machine takes what it takes."""


class Member:
    """What every member serves: calls, single requests, a blob and the run."""

    def __init__(self, lab, host: Host, folder: Path, idle_s: float) -> None:
        self.host = host
        self.answers = self.most_answers = 0
        self.calls = Calls(host, RUN, on_fault=lambda peer, fault: None)
        self.calls.register("double", bytes, bytes, self._double)
        lab.spawn(self.calls.serve())
        store = BlobStore(folder)
        self.blob = store.add_bytes(DATA)
        self.blobs = BlobServer(host, store, idle_s=idle_s)
        SingleRequests(host, SINGLE, 1000).set_handler(self._rows)
        serve_run(host, bytes.fromhex(recorded("wires")["messages"]["SignedRun"]))

    async def _double(self, peer: object, request: bytes) -> bytes:
        return 2 * request

    async def _rows(self, peer: object, request: bytes) -> bytes:
        return DATA


def shorten(monkeypatch) -> None:
    """Real transports get other deadlines: the same code, in seconds."""
    for module in (call_stream, outbox, server, single_request):
        monkeypatch.setattr(module, "PART_S", SHORT.part)
    monkeypatch.setattr(server, "HELLO_S", SHORT.hello)
    monkeypatch.setattr(single_request, "REQUEST_S", SHORT.request)


SIDES = {frames.PROTOCOL: 3, SINGLE: 2, PROTOCOL: 2, RUN_WIRE.protocol(): 1}
"""Kinds of streams of each protocol."""
ON_TWO = pytest.mark.parametrize(
    "run_lab", ["memory", pytest.param("p2pd", marks=pytest.mark.network)], indirect=True
)


@ON_TWO
def test_each_of_its_streams_ends_and_the_honest_are_served(run_lab, tmp_path, monkeypatch):
    async def scenario(lab):
        limits, pace_s = (SHIPPED, 1.0) if lab.transport == "memory" else (SHORT, 0.1)
        loop = asyncio.get_running_loop()
        member = Member(lab, await lab.host(), tmp_path, limits.idle)
        host, slow = await lab.host(), SlowPeer(await lab.host(), RUN, pace_s)
        honest = Calls(host, RUN, on_fault=lambda peer, fault: None)
        lab.spawn(honest.serve())
        await host.connect(await address_of(member.host))
        await asyncio.gather(honest.started.wait(), member.calls.started.wait())
        assert await honest.call(member.host.peer_id, "double", b"ab", bytes) == b"abab"
        if limits is SHORT:  # only now: the hello of the honest may take longer on a busy machine
            shorten(monkeypatch)
        kinds = slow.kinds(member.blob, SINGLE)
        large = codec.encode(bytes(30_000))
        requests = [framed(frames.request(number, "double", large)) for number in range(300)]
        kinds[f"{frames.PROTOCOL} replies"] = slow.reads(*requests, first=slow.greet)
        lab.spawn(slow.attack(await address_of(member.host), kinds))
        seen, slowest_s = dict[Stream, float](), 0.0
        ended = Counter[str]()
        while any(ended[protocol] < count for protocol, count in SIDES.items()):
            began = loop.time()
            assert await honest.call(member.host.peer_id, "double", b"ab", bytes) == b"abab"
            slowest_s = max(slowest_s, loop.time() - began)
            now = streams_of(member.host, slow.host.peer_id)
            assert len(now) <= 2 * len(kinds)
            for stream in now:
                lasted_s = loop.time() - seen.setdefault(stream, loop.time())
                assert lasted_s < limits.of(stream.protocol) + LATE_S[lab.transport], stream.protocol
            for stream in seen.keys() - {*now}:
                ended[stream.protocol] += 1
                del seen[stream]
            await asyncio.sleep(pace_s)
        assert slowest_s < (limits.hello if limits is SHIPPED else LATE_S[lab.transport])
        assert lab.faults == [], "slowness is no fault"

    run_lab(scenario)


def test_it_has_so_many_streams_and_answers_at_a_time(run_memory, tmp_path):
    """Three times as many as are served: the others are reset at once, and few answers are in memory."""

    async def scenario(lab):
        member = Member(lab, await lab.host(), tmp_path, SHIPPED.idle)
        slow = SlowPeer(await lab.host(), RUN, 5.0)
        way = {SINGLE + " answer": slow.kinds(member.blob, SINGLE)[SINGLE + " answer"]}
        for _ in range(STREAMS_PER_PEER + 10):
            lab.spawn(slow.attack(await address_of(member.host), way))
        seen = set()
        for _ in range(8):
            await asyncio.sleep(PART_S / 4)
            now = streams_of(member.host, slow.host.peer_id)
            assert len(now) <= STREAMS_PER_PEER
            answers = {stream for stream in now if stream._unacknowledged}
            assert len(answers) <= AT_ONCE
            seen |= answers
        assert len(seen) >= 2 * AT_ONCE, "none is borne for ever: others have their turn"

    run_memory(scenario)


def test_one_that_answers_calls_a_byte_at_a_time_is_hung_up_on(run_memory):
    """All answers of a peer share a stream, so its pings are late, too."""

    async def scenario(lab):
        a, b = await lab.pair()
        SlowPeer(b, RUN, 1.0)
        ours = Calls(a, RUN)
        silent = asyncio.Event()
        monitor = LivenessMonitor(
            ours, lambda: [b.peer_id], asyncio.get_running_loop().time, lambda peer, fault: None,
            lambda peer: silent.set(),
        )  # fmt: skip
        lab.spawn(ours.serve())
        lab.spawn(monitor.serve())
        asked = lab.spawn(expect_unreachable(ours.call(b.peer_id, "double", b"", bytes)))
        async with asyncio.timeout(STRIKES * SILENCE_S + EVERY_S):
            await silent.wait()
        await a.disconnect(b.peer_id)
        await asked

    run_memory(scenario)


def test_a_call_that_is_answered_a_byte_at_a_time_fails_without_pings(run_memory):
    async def scenario(lab):
        a, b = await lab.pair()
        SlowPeer(b, RUN, 1.0)
        ours = Calls(a, RUN)
        lab.spawn(ours.serve())
        await ours.started.wait()
        async with asyncio.timeout(PART_S + calls.OPEN_S):
            await expect_unreachable(ours.call(b.peer_id, "double", b"", bytes))

    run_memory(scenario)


async def expect_unreachable(work) -> None:
    with pytest.raises(Unreachable):
        await work


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_holder_that_trickles_costs_its_stall_or_nothing(run_memory, tmp_path, is_alone):
    async def scenario(lab):
        loop = asyncio.get_running_loop()
        here, slow, honest = await lab.host(), await lab.host(), await lab.host()
        SlowPeer(slow, RUN, 1.0).hold(DATA)
        BlobServer(honest, store := BlobStore(tmp_path / "theirs"))
        blob = store.add_bytes(DATA)
        for host in (slow, honest):
            await here.connect(await address_of(host))
        fetcher = BlobFetcher(here, BlobStore(tmp_path / "ours"), lambda peer, fault: pytest.fail(str(fault)))
        began = loop.time()
        if is_alone:
            with pytest.raises(Unreachable, match=f"stalled for {STALL_S:.0f} s"):
                await fetcher.fetch(blob, [slow.peer_id], len(DATA))
        else:
            found = await fetcher.fetch(blob, [slow.peer_id, honest.peer_id], len(DATA))
            assert found.read_bytes() == DATA
        assert loop.time() - began < (2 * STALL_S if is_alone else STALL_S)

    run_memory(scenario)
