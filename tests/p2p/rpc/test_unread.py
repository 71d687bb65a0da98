"""Replies that nobody takes: they count until they are written, for each peer and for all peers together."""

import asyncio

import pytest

from atoll.p2p.host.framing import framed, read_frame, write_frame
from atoll.p2p.rpc import frames, server
from atoll.p2p.rpc.call_stream import IN_FLIGHT
from atoll.p2p.rpc.calling_peer import CallingPeer
from atoll.p2p.rpc.outbox import QUEUED_BYTES, Backlog, FrameOutbox
from atoll.p2p.rpc.server import STREAMS_PER_PEER
from atoll.p2p.transports.memory.memory_stream import WINDOW_BYTES
from atoll.protocols import codec
from atoll.protocols.errors import Unreachable
from tests.p2p.rpc.test_calls import RUN, Member, Number, Text, raw_stream

LARGE, LARGEST = 250_000, 256 * 1024


async def server_of(lab, host):
    """A member that answers `large` with LARGE bytes and `small` with few. Returns it and how often each ran."""
    member, ran = await Member.join(lab, host), {"large": 0, "small": 0}

    async def large(peer, request):
        ran["large"] += 1
        return Text("x" * LARGE)

    async def small(peer, request):
        ran["small"] += 1
        return request

    member.calls.register("large", Number, Text, large, max_bytes=LARGEST)
    member.calls.register("small", Number, Number, small)
    return member, ran


async def ask_and_never_read(host, other, streams=STREAMS_PER_PEER):
    """A peer that has all its requests in flight, twice, on each of its streams."""
    opened = [await raw_stream(host, other) for _ in range(streams)]
    for number in range(2 * IN_FLIGHT):
        for stream in opened:
            await write_frame(stream, frames.request(number, "large", codec.encode(Number(number))))
    await asyncio.sleep(5)
    return opened


def test_a_peer_that_reads_nothing_holds_one_bound_over_all_its_streams(run_memory):
    async def scenario(lab):
        a, b = await lab.pair()
        member, ran = await server_of(lab, b)
        most = 0

        async def watch():
            nonlocal most
            while True:
                most = max(most, member.calls._answers._unread_bytes)
                await asyncio.sleep(0.01)

        watching = lab.spawn(watch())
        for stream in await ask_and_never_read(a, b):
            stream.reset()
        watching.cancel()
        await asyncio.wait([watching])
        assert QUEUED_BYTES < most < QUEUED_BYTES + LARGEST
        # A stream that gave way to a newer one took a window, and dropped one bound.
        on_the_way = STREAMS_PER_PEER * WINDOW_BYTES
        assert ran["large"] * LARGE < on_the_way + STREAMS_PER_PEER * (QUEUED_BYTES + LARGEST)

    run_memory(scenario)


def test_a_peer_whose_old_stream_is_dead_is_answered_on_its_new_one(run_memory):
    """Its line broke, and its old stream does not know yet: replies that nobody takes do not mute the new one."""

    async def scenario(lab):
        a, b = await lab.pair()
        member, _ = await server_of(lab, b)
        (old,) = await ask_and_never_read(a, b, 1)
        new = await raw_stream(a, b)
        async with asyncio.timeout(1):
            for name in ("small", "large"):
                await write_frame(new, frames.request(1, name, codec.encode(Number(1))))
                assert frames.parse(await read_frame(new, LARGEST + 100)).kind is frames.Kind.REPLY
        with pytest.raises(Unreachable):
            await old.read_exactly(4 * WINDOW_BYTES)
        assert not member.faults
        new.reset()

    run_memory(scenario)


def test_a_peer_that_still_reads_its_old_stream_keeps_it(run_memory):
    async def scenario(lab):
        a, b = await lab.pair()
        await server_of(lab, b)
        old, new = [await raw_stream(a, b) for _ in range(2)]
        for number in range(40):
            await write_frame(old, frames.request(number, "large", codec.encode(Number(number))))
        taken = lab.spawn(take_slowly(old))
        for number in range(20):
            await asyncio.sleep(1)
            await write_frame(new, frames.request(number, "small", codec.encode(Number(number))))
        assert await taken == 40
        for stream in (old, new):
            stream.reset()

    run_memory(scenario)


def test_a_dead_stream_with_requests_that_wait_gives_way_too(run_memory):
    """Its requests are full besides: they wait for room that its own replies take."""

    async def scenario(lab):
        a, b = await lab.pair()
        member, _ = await server_of(lab, b)

        async def echo(peer, request):
            return request

        member.calls.register("echo", Text, Text, echo, max_bytes=LARGEST)
        old = await raw_stream(a, b)
        for number in range(13):
            await write_frame(old, frames.request(number, "echo", codec.encode(Text("y" * LARGE))))
        await asyncio.sleep(5)
        new = await raw_stream(a, b)
        async with asyncio.timeout(3):
            await write_frame(new, frames.request(1, "small", codec.encode(Number(1))))
            assert frames.parse(await read_frame(new, LARGEST + 100)).kind is frames.Kind.REPLY
        new.reset()

    run_memory(scenario)


def test_who_takes_replies_gets_all_of_them(run_memory):
    async def scenario(lab):
        a, b = await lab.pair()
        member, _ = await server_of(lab, b)
        other = await Member.join(lab, a)
        async with asyncio.TaskGroup() as group:
            for number in range(2 * IN_FLIGHT):
                call = other.calls.call(b.peer_id, "large", Number(number), Text, max_bytes=LARGEST)
                group.create_task(call)
        await asyncio.sleep(1)
        assert member.calls._answers._unread_bytes == 0

    run_memory(scenario)


def test_all_peers_together_have_a_bound_and_the_idlest_goes(run_memory, dial, monkeypatch):
    """Strangers that read nothing fill it. Those that take what they asked for are served, small or large."""
    monkeypatch.setattr(server, "UNREAD_BYTES", 3 * QUEUED_BYTES)

    async def scenario(lab):
        _, b = await lab.pair()
        member, _ = await server_of(lab, b)
        honest, strangers = [await lab.host() for _ in range(2)], [await lab.host() for _ in range(8)]
        for host in (*honest, *strangers):
            await host.connect(await dial(b))
        slow = await raw_stream(honest[0], b)
        for number in range(40):
            await write_frame(slow, frames.request(number, "large", codec.encode(Number(number))))
        taken = lab.spawn(take_slowly(slow))
        caller = await Member.join(lab, honest[1])
        opened = []
        for stranger in strangers:
            opened += await ask_and_never_read(stranger, b, 2)
            assert member.calls._answers._unread_bytes <= 3 * QUEUED_BYTES
            answer = await caller.calls.call(b.peer_id, "small", Number(1), Number)
            assert answer == Number(1)
            text = await caller.calls.call(b.peer_id, "large", Number(1), Text, max_bytes=LARGEST)
            assert len(text.text) == LARGE
        assert await taken == 40, "who takes something every second is not the idlest"
        for stream in (slow, *opened):
            stream.reset()
        await asyncio.sleep(1)
        assert member.calls._answers._unread_bytes == 0
        assert not member.faults
        assert not lab.faults

    run_memory(scenario)


class Held:
    """A server of which peers hold replies, without streams. `strangers`: the peers that no final set names."""

    def __init__(self, monkeypatch, most_bytes, strangers=(), of_strangers=0):
        monkeypatch.setattr(server, "UNREAD_BYTES", most_bytes)
        monkeypatch.setattr(server, "UNREAD_OF_STRANGERS", of_strangers)
        hello = frames.hello(RUN, "a", "x")
        self.answers = server.CallServer(hello, print, lambda peer: peer not in strangers)

    def put(self, peer, size):
        """A reply for a new stream of `peer`."""
        guests = self.answers._guests
        guest = guests.setdefault(peer, CallingPeer(peer, self.answers._count_unread))
        guest.outboxes.append(outbox := FrameOutbox(guest.unread))
        outbox.put(b"x" * (size - 4))
        return outbox


def test_the_stream_goes_that_took_nothing_for_the_longest_time(run_memory, monkeypatch):
    async def scenario(lab):
        held, outboxes = Held(monkeypatch, 100), []
        for peer in "abc":
            outboxes.append(held.put(peer, 44))
            await asyncio.sleep(1)
        assert [outbox.bytes for outbox in outboxes] == [0, 44, 44]
        outboxes[1]._note_taken()
        outboxes[0] = held.put("a", 44)
        assert [outbox.bytes for outbox in outboxes] == [44, 44, 0]

    run_memory(scenario)


def test_the_peer_goes_first_that_holds_most(run_memory, monkeypatch):
    """Strangers that leave 2 MiB unread and come back when they are ended push no slow honest line out."""

    async def scenario(lab):
        held = Held(monkeypatch, 6 * QUEUED_BYTES)
        slow = held.put("slow", QUEUED_BYTES // 2)
        for number in range(20):
            await asyncio.sleep(1)
            held.put(f"b{number}", 2 * QUEUED_BYTES)
        assert slow.bytes == QUEUED_BYTES // 2

    run_memory(scenario)


def test_strangers_go_before_members_but_for_a_share(run_memory, monkeypatch):
    async def scenario(lab):
        held = Held(monkeypatch, 8 * QUEUED_BYTES, {"new", "newer", "newest"}, of_strangers=2 * QUEUED_BYTES)
        member = held.put("member", 5 * QUEUED_BYTES)
        await asyncio.sleep(1)
        new = held.put("new", 2 * QUEUED_BYTES)
        newer = held.put("newer", QUEUED_BYTES)
        assert (member.bytes, newer.bytes, new.bytes) == (5 * QUEUED_BYTES, QUEUED_BYTES, 2 * QUEUED_BYTES)
        newest = held.put("newest", QUEUED_BYTES)
        assert (member.bytes, new.bytes) == (5 * QUEUED_BYTES, 0), "they hold more than their share"
        other = held.put("other", 2 * QUEUED_BYTES)
        assert (newer.bytes, newest.bytes) == (QUEUED_BYTES, QUEUED_BYTES), "members push nobody out of the share"
        assert (member.bytes, other.bytes) == (0, 2 * QUEUED_BYTES)

    run_memory(scenario)


async def take_slowly(stream):
    """Take a reply a second. Returns how many came."""
    for _ in range(40):
        assert frames.parse(await read_frame(stream, LARGEST + 100)).kind is frames.Kind.REPLY
        await asyncio.sleep(1)
    return 40


def test_an_outbox_counts_what_its_stream_has_not_taken(run_memory):
    async def scenario(lab):
        changes = []
        outbox = FrameOutbox(Backlog(changes.append))
        writes = []

        class Stuck:
            async def write(self, data):
                writes.append(bytes(data))
                await asyncio.sleep(10)

            def reset(self):
                writes.append(b"reset")

        for _ in range(3):
            outbox.put(b"x" * 40_000)
        draining = lab.spawn(outbox.drain(Stuck()))
        await asyncio.sleep(5)
        assert outbox.bytes == sum(changes) == 3 * 40_004, "the first is being written, and counts"
        await asyncio.sleep(10)
        assert outbox.bytes == 2 * 40_004
        outbox.break_off()
        assert outbox.bytes == sum(changes) == 0
        assert writes[:1] == [framed(b"x" * 40_000)]
        outbox.put(b"late")
        assert outbox.bytes == 0
        draining.cancel()
        await asyncio.wait([draining])
        assert sum(changes) == 0

    run_memory(scenario)


def test_those_that_wait_for_room_pass_one_by_one(run_memory):
    async def scenario(lab):
        backlog, passed = Backlog(), []

        async def enter(number):
            await backlog.room()
            passed.append(number)
            backlog.change(QUEUED_BYTES)

        backlog.change(QUEUED_BYTES)
        waiting = [lab.spawn(enter(number)) for number in range(3)]
        await asyncio.sleep(1)
        assert passed == []
        backlog.change(-1)
        await asyncio.sleep(1)
        assert passed == [0]
        backlog.change(-QUEUED_BYTES)
        await asyncio.sleep(1)
        assert len(passed) == 2
        backlog.change(-3 * QUEUED_BYTES)
        await asyncio.wait(waiting)

    run_memory(scenario)


def test_a_peer_whose_requests_wait_is_not_read(run_memory):
    """A large request waits for its turn, so what waits is bounded in bytes, too."""

    async def scenario(lab):
        a, b = await lab.pair()
        member = await Member.join(lab, b)
        goes_on = asyncio.Event()

        async def waits(peer, request):
            await goes_on.wait()
            return Number(1)

        member.calls.register("waits", Text, Number, waits, max_bytes=LARGEST)
        streams = [await raw_stream(a, b) for _ in range(2)]

        async def flood(stream):
            for number in range(40):
                await write_frame(stream, frames.request(number, "waits", codec.encode(Text("y" * LARGE))))

        floods = [lab.spawn(flood(stream)) for stream in streams]
        await asyncio.sleep(5)
        asked = member.calls._answers._guests[a.peer_id].asked.bytes
        assert QUEUED_BYTES <= asked < QUEUED_BYTES + 2 * LARGEST
        goes_on.set()
        await asyncio.wait(floods)
        await asyncio.sleep(5)
        assert member.calls._answers._guests[a.peer_id].asked.bytes == 0
        for stream in streams:
            stream.reset()

    run_memory(scenario)


@pytest.mark.parametrize("name", ["small", "large"])
def test_one_request_of_a_stream_runs_in_a_turn_of_the_loop(run_memory, name):
    """What others wait for is looked at in between: handlers of one peer do not run back to back."""

    async def scenario(lab):
        a, b = await lab.pair()
        _, ran = await server_of(lab, b)
        most = 0

        async def tick():
            nonlocal most
            while True:
                before = ran[name]
                await asyncio.sleep(0)
                most = max(most, ran[name] - before)

        stream = await raw_stream(a, b)
        burst = b"".join(framed(frames.request(n, name, codec.encode(Number(n)))) for n in range(4))
        await stream.write(burst)
        ticking = lab.spawn(tick())
        for _ in range(2000):
            await asyncio.sleep(0)
        ticking.cancel()
        await asyncio.wait([ticking])
        await asyncio.sleep(5)
        assert ran[name] == 4
        stream.reset()

    run_memory(scenario)
