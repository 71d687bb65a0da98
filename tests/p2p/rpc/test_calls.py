"""Typed calls between members: replies, errors, limits, and peers that break the rules."""

import asyncio
import contextlib
from typing import Annotated

import msgspec
import pytest

from atoll.p2p.host.framing import framed, read_frame, write_frame
from atoll.p2p.rpc import frames
from atoll.p2p.rpc.call_stream import IN_FLIGHT
from atoll.p2p.rpc.calls import Calls
from atoll.p2p.rpc.outbox import NOTICES_QUEUED, QUEUED_BYTES, NoticeQueue
from atoll.p2p.rpc.server import STREAMS_PER_PEER
from atoll.p2p.transports.memory.memory_stream import WINDOW_BYTES
from atoll.protocols import codec
from atoll.protocols.errors import (
    ConfigError,
    DecodeError,
    LocalFault,
    PeerFault,
    RunMismatch,
    SignatureFault,
    Unreachable,
    VersionMismatch,
)
from atoll.protocols.ids import RunId, short
from tests.waiting import eventually

RUN, OTHER_RUN = RunId(b"\x11" * 32), RunId(b"\x22" * 32)


class Text(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: Annotated[str, msgspec.Meta(max_length=1 << 20)]


class Number(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    number: int


class Member:
    """A host with calls, and the faults that it reported."""

    def __init__(self, lab, host, run=RUN, **options):
        self.faults = []
        self.host = host
        self.calls = Calls(host, run, on_fault=lambda peer, fault: self.faults.append((peer, fault)), **options)
        self.serving = lab.spawn(self.calls.serve())

    @classmethod
    async def join(cls, lab, host, run=RUN, **options):
        """A member whose calls are being served."""
        member = cls(lab, host, run, **options)
        await asyncio.sleep(0)
        return member

    @property
    def peer_id(self):
        return self.host.peer_id


async def members(lab, run=RUN, **options):
    """Two connected members; the second can be called."""
    a, b = await lab.pair()
    return await Member.join(lab, a), await Member.join(lab, b, run, **options)


async def upper(peer, request):
    return Text(request.text.upper())


def test_a_reply_comes_back(run_lab):
    async def scenario(lab):
        a, b = await members(lab)
        asked = []

        async def who(peer, request):
            asked.append(peer)
            return Text(request.text.upper())

        b.calls.register("upper", Text, Text, who)
        while True:  # p2pd hears of a handler that is set late a moment later
            try:
                assert await a.calls.call(b.peer_id, "upper", Text("abc"), Text) == Text("ABC")
                break
            except Unreachable:
                await asyncio.sleep(0.01)
        assert asked == [a.peer_id]
        assert a.host.statistics().streams_open == 1

    run_lab(scenario)


def test_replies_overtake_slow_requests(run_memory):
    async def scenario(lab):
        a, b = await members(lab)

        async def after(peer, request):
            await asyncio.sleep(request.number)
            return request

        b.calls.register("after", Number, Number, after)
        done = []

        async def ask(delay_s):
            done.append((await a.calls.call(b.peer_id, "after", Number(delay_s), Number)).number)

        async with asyncio.TaskGroup() as group:
            for delay_s in (9, 1, 5):
                group.create_task(ask(delay_s))
        assert done == [1, 5, 9]
        assert a.host.statistics().streams_open == 1

    run_memory(scenario)


def test_one_that_ends_runs_no_handler(run_memory):
    """Its ledger may be closed while its host still serves streams."""

    async def scenario(lab):
        a, b = await members(lab)
        asked = []

        async def note(peer, request):
            asked.append(request.text)
            return request

        b.calls.register("note", Text, Text, note)
        b.calls.register_notice("hint", Text, note)
        assert await a.calls.call(b.peer_id, "note", Text("before"), Text) == Text("before")
        b.serving.cancel()
        await asyncio.wait([b.serving])
        a.calls.notify(b.peer_id, "hint", Text("after"))
        with pytest.raises(Unreachable, match="this node is ending"):
            await a.calls.call(b.peer_id, "note", Text("after"), Text)
        assert asked == ["before"]
        assert a.faults == b.faults == []

    run_memory(scenario)


def test_both_directions_at_once(run_memory):
    async def scenario(lab):
        a, b = await members(lab)

        async def ask_back(peer, request):
            return await b.calls.call(peer, "upper", request, Text)

        a.calls.register("upper", Text, Text, upper)
        b.calls.register("ask_back", Text, Text, ask_back)
        assert await a.calls.call(b.peer_id, "ask_back", Text("x"), Text) == Text("X")

    run_memory(scenario)


@pytest.mark.parametrize(
    ("raised", "seen", "message"),
    [
        (PeerFault("you lied", hint="do not"), PeerFault, "you lied; do not"),
        (SignatureFault("not yours"), PeerFault, "not yours"),
        (RunMismatch("another run"), RunMismatch, "another run"),
        (LocalFault("disk full"), Unreachable, "disk full"),
        (ConfigError("my config"), Unreachable, "my config"),
        (Unreachable("cannot ask on"), Unreachable, "cannot ask on"),
        (ZeroDivisionError("secret"), Unreachable, "boom failed on this machine"),
    ],
)
def test_errors_of_the_other_side(run_memory, raised, seen, message):
    async def scenario(lab):
        a, b = await members(lab)

        async def boom(peer, request):
            raise raised

        b.calls.register("boom", Text, Text, boom)
        b.calls.register("upper", Text, Text, upper)
        with pytest.raises(seen) as caught:
            await a.calls.call(b.peer_id, "boom", Text("x"), Text)
        assert type(caught.value) is seen
        assert str(caught.value) == f"peer {short(b.peer_id)}: {message}"
        assert await a.calls.call(b.peer_id, "upper", Text("x"), Text) == Text("X")  # the stream goes on
        expected = [raised] if isinstance(raised, PeerFault) else []
        assert [fault for _, fault in b.faults] == expected
        assert a.faults == []

    run_memory(scenario)


def test_an_unknown_method_is_said_so(run_memory):
    async def scenario(lab):
        a, b = await members(lab)
        with pytest.raises(Unreachable, match="no method 'nothing' here"):
            await a.calls.call(b.peer_id, "nothing", Text("x"), Text)
        assert b.faults == []

    run_memory(scenario)


def test_a_bad_request_is_the_callers_fault(run_memory):
    async def scenario(lab):
        a, b = await members(lab)
        b.calls.register("upper", Text, Text, upper)
        with pytest.raises(PeerFault, match="not a legal Text"):
            await a.calls.call(b.peer_id, "upper", Number(1), Text)
        ((peer, fault),) = b.faults
        assert (peer, type(fault)) == (a.peer_id, DecodeError)

    run_memory(scenario)


def test_a_bad_reply_is_a_decode_error(run_memory):
    async def scenario(lab):
        a, b = await members(lab)

        async def wrong(peer, request):
            return Number(1)

        b.calls.register("wrong", Text, Number, wrong)
        with pytest.raises(DecodeError, match="not a legal Text"):
            await a.calls.call(b.peer_id, "wrong", Text("x"), Text)

    run_memory(scenario)


def test_peers_of_another_run_are_told_in_plain_words(run_lab):
    async def scenario(lab):
        a, b = await members(lab, run=OTHER_RUN)
        b.calls.register("upper", Text, Text, upper)

        async def is_served() -> bool:
            """Whether p2pd has heard of the handler, which was set late."""
            try:
                await a.calls.call(b.peer_id, "upper", Text("x"), Text)
            except Unreachable:
                return False
            except RunMismatch:
                return True

        await eventually(is_served)
        for caller, called, ours, theirs in ((a, b, RUN, OTHER_RUN), (b, a, OTHER_RUN, RUN)):
            with pytest.raises(RunMismatch) as caught:
                await caller.calls.call(called.peer_id, "upper", Text("x"), Text)
            assert str(caught.value) == (
                f"peer {short(called.peer_id)} trains run {short(theirs)}, we train run {short(ours)}"
            )
        assert a.faults == b.faults == []

    run_lab(scenario)


def test_sizes_are_capped_per_method(run_memory):
    async def scenario(lab):
        a, b = await members(lab)

        async def long(peer, request):
            return Text("x" * request.number)

        b.calls.register("long", Number, Text, long)
        b.calls.register("longer", Number, Text, long, max_bytes=1 << 20)
        b.calls.register("upper", Text, Text, upper, max_bytes=100)
        assert len((await a.calls.call(b.peer_id, "long", Number(60_000), Text)).text) == 60_000
        with pytest.raises(Unreachable, match="more than 65536"):
            await a.calls.call(b.peer_id, "long", Number(70_000), Text)
        await asyncio.sleep(1)  # the reader waits for a frame before the larger cap is known
        big = await a.calls.call(b.peer_id, "longer", Number(1_000_000), Text, max_bytes=1 << 20)
        assert len(big.text) == 1_000_000
        with pytest.raises(DecodeError):
            await a.calls.call(b.peer_id, "longer", Number(1_000_000), Text)
        with pytest.raises(PeerFault, match="at most 100 are legal"):
            await a.calls.call(b.peer_id, "upper", Text("x" * 200), Text)

    run_memory(scenario)


def test_one_peer_gets_so_many_answers_at_one_time(run_memory):
    async def scenario(lab):
        a, b = await members(lab)
        running = most = 0

        async def slow(peer, request):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(1)
            running -= 1
            return request

        b.calls.register("slow", Number, Number, slow)
        async with asyncio.TaskGroup() as group:
            for number in range(3 * IN_FLIGHT):
                group.create_task(a.calls.call(b.peer_id, "slow", Number(number), Number))
        assert most == IN_FLIGHT

    run_memory(scenario)


def test_a_rude_peer_gets_no_more(run_memory):
    """A peer that ignores the limit and sends 1000 requests at once is only served 64 at a time."""

    async def scenario(lab):
        a, b = await lab.pair()
        member = await Member.join(lab, b)
        running = most = 0

        async def slow(peer, request):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(1)
            running -= 1
            return request

        member.calls.register("slow", Number, Number, slow)
        streams = [await raw_stream(a, b) for _ in range(3)]
        for number in range(1000):
            await write_frame(streams[number % 3], frames.request(number, "slow", codec.encode(Number(1))))
        await asyncio.sleep(20)
        assert most == IN_FLIGHT
        for stream in streams:
            stream.reset()

    run_memory(scenario)


def test_one_peer_has_few_calls_streams(run_memory):
    async def scenario(lab):
        a, b = await lab.pair()
        await Member.join(lab, b)
        streams = [await raw_stream(a, b) for _ in range(STREAMS_PER_PEER)]
        with pytest.raises(Unreachable):
            await raw_stream(a, b)
        streams.pop().reset()
        await asyncio.sleep(1)
        streams.append(await raw_stream(a, b))
        for stream in streams:
            stream.reset()

    run_memory(scenario)


def test_a_peer_that_does_not_read_is_not_served_on(run_memory):
    async def scenario(lab):
        a, b = await lab.pair()
        member = await Member.join(lab, b)

        answered = []

        async def large(peer, request):
            answered.append(peer)
            return Text("x" * 60_000)

        member.calls.register("large", Text, Text, large)
        request = codec.encode(Text("y" * 1000))
        stream = await raw_stream(a, b)

        async def flood():
            for number in range(5_000):  # more than all buffers hold
                await write_frame(stream, frames.request(number, "large", request))

        async def flood_until_the_end():
            with pytest.raises(Unreachable):
                await flood()

        flooding = lab.spawn(flood_until_the_end())
        await asyncio.sleep(60)
        held = 60_000 * len(answered)
        assert held < WINDOW_BYTES + QUEUED_BYTES + 2 * 60_000
        stream.reset()
        await asyncio.wait([flooding])

    run_memory(scenario)


async def raw_stream(a, b, run=RUN):
    """A calls stream by hand, after the Hello."""
    stream = await a.open_stream(b.peer_id, frames.PROTOCOL)
    await write_frame(stream, codec.encode(frames.hello(run, a.peer_id, "rude")))
    theirs = codec.decode(await read_frame(stream, 1024), frames.Hello)
    assert (theirs.peer, theirs.run) == (b.peer_id, RUN)
    return stream


@pytest.mark.parametrize(
    "data",
    [
        framed(b""),
        framed(b"\x09garbage"),
        framed(frames.request(1, "m" * 64, b""))[:-1] + b"\xff",
        (1 << 31).to_bytes(4, "little"),
    ],
)
def test_bad_frames_end_the_stream_and_are_reported(run_memory, data):
    async def scenario(lab):
        a, b = await lab.pair()
        await Member.join(lab, b)
        stream = await raw_stream(a, b)
        await stream.write(data)
        with pytest.raises(Unreachable):
            await stream.read_exactly(1)
        ((peer, fault),) = lab.faults
        assert (peer, type(fault)) == (a.peer_id, DecodeError)
        stream.reset()

    run_memory(scenario)


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        ({"newest": 9, "oldest": 9}, []),  # a correct node, of another version
        ({"wire": "blob"}, [DecodeError]),
        ({"peer": "12D3KooWother"}, [DecodeError]),
    ],
)
def test_a_hello_that_cannot_be_followed(run_memory, change, faults):
    async def scenario(lab):
        a, b = await lab.pair()
        await Member.join(lab, b)
        stream = await a.open_stream(b.peer_id, frames.PROTOCOL)
        hello = msgspec.structs.replace(frames.hello(RUN, a.peer_id, "x"), **change)
        await write_frame(stream, codec.encode(hello))
        await read_frame(stream, 1024)  # it answers all the same: so we learn its versions
        with pytest.raises(Unreachable):
            await stream.read_exactly(1)
        assert [type(fault) for _, fault in lab.faults] == faults
        stream.reset()

    run_memory(scenario)


def test_a_caller_of_another_version_learns_of_it(run_memory):
    async def scenario(lab):
        async def newer(stream):
            theirs = await read_frame(stream, 1024)
            assert theirs
            hello = msgspec.structs.replace(frames.hello(RUN, b.peer_id, "x"), newest=9, oldest=9)
            await write_frame(stream, codec.encode(hello))

        a, b = await lab.pair({frames.PROTOCOL: newer})
        member = await Member.join(lab, a)
        with pytest.raises(VersionMismatch, match="the peer 9 to 9; upgrade the older node"):
            await member.calls.call(b.peer_id, "upper", Text("x"), Text)

    run_memory(scenario)


def test_silence_instead_of_a_hello_ends(run_memory):
    async def scenario(lab):
        async def silent(stream):
            await asyncio.sleep(1000)

        a, b = await lab.pair({frames.PROTOCOL: silent})
        member = await Member.join(lab, a)
        start_s = asyncio.get_running_loop().time()
        with pytest.raises(Unreachable, match="Hello"):
            await member.calls.call(b.peer_id, "upper", Text("x"), Text)
        assert asyncio.get_running_loop().time() - start_s == pytest.approx(10, abs=0.2)

        b_calls = await Member.join(lab, b)
        stream = await a.open_stream(b.peer_id, frames.PROTOCOL)
        with pytest.raises(Unreachable):
            await stream.read_exactly(1)
        assert asyncio.get_running_loop().time() - start_s == pytest.approx(20, abs=0.4)
        assert b_calls.faults == []
        stream.reset()

    run_memory(scenario)


def test_cancelled_calls_cancel_their_handlers(run_memory):
    async def scenario(lab):
        a, b = await members(lab)
        cancelled = asyncio.Event()

        async def forever(peer, request):
            try:
                await asyncio.sleep(50)
            except asyncio.CancelledError:
                cancelled.set()
                raise

        b.calls.register("forever", Text, Text, forever)
        b.calls.register("upper", Text, Text, upper)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await a.calls.call(b.peer_id, "forever", Text("x"), Text)
        async with asyncio.timeout(1):
            await cancelled.wait()
        assert await a.calls.call(b.peer_id, "upper", Text("x"), Text) == Text("X")

    run_memory(scenario)


def test_a_large_reply_that_crosses_the_end_of_its_call_is_no_fault(run_memory):
    """After a partition a busy machine answers late, and its callers give up just before the answer comes."""

    async def scenario(lab):
        a, b = await members(lab)

        async def late(peer, request):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(50)
            return Text("x" * 200_000)

        b.calls.register("late", Text, Text, late, max_bytes=1 << 20)
        b.calls.register("upper", Text, Text, upper)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await a.calls.call(b.peer_id, "late", Text("x"), Text, max_bytes=1 << 20)
        async with asyncio.TaskGroup() as group:
            beside = group.create_task(a.calls.call(b.peer_id, "upper", Text("x"), Text))
            await asyncio.sleep(1)
        assert beside.result() == Text("X"), "on the same stream"
        assert a.faults == []

    run_memory(scenario)


def test_a_request_with_the_id_of_an_open_one_ends_the_stream(run_memory):
    async def scenario(lab):
        a, b = await lab.pair()
        member = await Member.join(lab, b)
        ended = []

        async def forever(peer, request):
            try:
                await asyncio.sleep(1000)
            finally:
                ended.append(peer)

        member.calls.register("forever", Text, Text, forever)
        stream = await raw_stream(a, b)
        for _ in range(2):
            await write_frame(stream, frames.request(7, "forever", codec.encode(Text("x"))))
        with pytest.raises(Unreachable):
            await stream.read_exactly(1)
        assert ended == [a.peer_id], "what still ran was ended, too"
        assert [peer for peer, _ in lab.faults] == [a.peer_id]

    run_memory(scenario)


def test_a_handler_that_never_answers_is_cut_off(run_memory):
    async def scenario(lab):
        a, b = await members(lab)

        async def forever(peer, request):
            await asyncio.sleep(1000)

        b.calls.register("forever", Text, Text, forever)
        with pytest.raises(Unreachable, match="forever took too long"):
            await a.calls.call(b.peer_id, "forever", Text("x"), Text)

    run_memory(scenario)


def test_calls_in_flight_fail_at_once_when_the_transport_dies(run_lab):
    async def scenario(lab):
        a, b = await members(lab)
        started = asyncio.Event()

        async def forever(peer, request):
            started.set()
            await asyncio.Event().wait()

        b.calls.register("forever", Text, Text, forever)

        async def ask():
            while True:
                try:
                    await a.calls.call(b.peer_id, "forever", Text("x"), Text)
                except Unreachable:
                    if started.is_set():
                        return
                    await asyncio.sleep(0.01)

        asking = lab.spawn(ask())
        await started.wait()
        lab.kill_transport(b.host)
        await asking

    run_lab(scenario)


def test_a_new_stream_is_opened_after_the_old_one_broke(run_memory, dial):
    async def scenario(lab):
        a, b = await members(lab)
        b.calls.register("upper", Text, Text, upper)
        assert await a.calls.call(b.peer_id, "upper", Text("x"), Text) == Text("X")
        where = await dial(b.host)
        await a.host.disconnect(b.peer_id)
        with pytest.raises(Unreachable):
            await a.calls.call(b.peer_id, "upper", Text("x"), Text)
        await a.host.connect(where)
        assert await a.calls.call(b.peer_id, "upper", Text("y"), Text) == Text("Y")

    run_memory(scenario)


def test_the_first_caller_may_give_up_without_harm_to_the_second(run_memory):
    async def scenario(lab):
        a, b = await members(lab)
        b.calls.register("upper", Text, Text, upper)
        first = lab.spawn(a.calls.call(b.peer_id, "upper", Text("x"), Text))
        second = lab.spawn(a.calls.call(b.peer_id, "upper", Text("y"), Text))
        await asyncio.sleep(0.015)
        first.cancel()
        assert await second == Text("Y")

    run_memory(scenario)


def test_notices_arrive_in_order(run_memory):
    async def scenario(lab):
        a, b = await members(lab)
        heard = []

        async def hear(peer, message):
            heard.append(message.number)

        b.calls.register_notice("count", Number, hear)
        for number in range(100):
            a.calls.notify(b.peer_id, "count", Number(number))
        await asyncio.sleep(1)
        assert heard == list(range(100))

    run_memory(scenario)


def test_a_full_notice_queue_loses_the_oldest(run_memory):
    async def scenario(lab):
        a, b = await members(lab)
        heard = []

        async def hear(peer, message):
            heard.append(message.number)

        b.calls.register_notice("count", Number, hear)
        for number in range(NOTICES_QUEUED + 44):
            a.calls.notify(b.peer_id, "count", Number(number))
        await asyncio.sleep(1)
        assert heard == list(range(44, NOTICES_QUEUED + 44))
        nobody = a.peer_id
        a.calls.notify(nobody, "count", Number(0))
        await asyncio.sleep(100)
        assert nobody not in a.calls._links, "what waits for nobody is dropped"

    run_memory(scenario)


def test_the_notice_queue_is_bounded_in_bytes():
    queue = NoticeQueue()
    for _ in range(30):
        queue.put(bytes(100_000))
    assert len(queue) == 10
    assert sum(map(len, queue.take(250_000))) == 300_000
    queue.drop_all()
    assert (len(queue), queue.take(1)) == (0, [])


def test_calls_need_their_owner(run_memory):
    async def scenario(lab):
        a, b = await lab.pair()
        calls = Calls(a, RUN)
        with pytest.raises(LocalFault, match="not being served"):
            await calls.call(b.peer_id, "upper", Text("x"), Text)
        calls.notify(b.peer_id, "upper", Text("x"))
        assert not calls._links, "a notice is dropped"
        calls.register("upper", Text, Text, upper)
        with pytest.raises(ValueError, match="registered already"):
            calls.register("upper", Text, Text, upper)

    run_memory(scenario)
