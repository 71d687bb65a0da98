"""Every transport obeys the rules of atoll.p2p.host.interface. Each scenario runs on each transport."""

import asyncio
import os

import pytest

from atoll.p2p.host.interface import HostRestarted, PeerAddress, PeerConnected, PeerDisconnected, Route
from atoll.protocols.errors import DecodeError, LocalFault, Unreachable
from atoll.protocols.identity import Identity

STRANGER = Identity(b"s" * 32).peer_id


async def echo(stream):
    """Sends back every byte until the other side ends."""
    while True:
        await stream.write(await stream.read_exactly(4))


async def blob_echo(stream):
    """u32 size, bytes; all come back."""
    size = int.from_bytes(await stream.read_exactly(4), "little")
    await stream.write(await stream.read_exactly(size))


async def wait_for(events, kind):
    async for event in events:
        if isinstance(event, kind):
            return event
    raise AssertionError("the events ended")


def test_streams_carry_bytes_both_ways(run_lab):
    async def scenario(lab):
        a, b = await lab.pair({"/blob": blob_echo})
        stream = await a.open_stream(b.peer_id, "/blob")
        assert (stream.peer, stream.protocol) == (b.peer_id, "/blob")
        data = os.urandom(1 << 20)
        async with asyncio.TaskGroup() as group:
            group.create_task(stream.write(len(data).to_bytes(4, "little") + data))
            read = group.create_task(stream.read_exactly(len(data)))
        assert read.result() == data
        up, down = a.statistics().bytes_up, a.statistics().bytes_down
        assert (up, down) == (len(data) + 4, len(data))
        assert a.statistics().streams_open == 1
        await stream.close()
        await stream.close()
        assert a.statistics().streams_open == 0
        with pytest.raises(Unreachable):
            await stream.write(b"x")

    run_lab(scenario)


def test_the_responder_knows_who_calls(run_lab):
    async def scenario(lab):
        seen = asyncio.Queue()

        async def who(stream):
            await seen.put((stream.peer, stream.protocol))

        a, b = await lab.pair({"/who": who})
        stream = await a.open_stream(b.peer_id, "/who")
        assert await seen.get() == (a.peer_id, "/who")
        await stream.close()

    run_lab(scenario)


def test_strangers_are_unreachable(run_lab, dial):
    async def scenario(lab):
        a, b = await lab.pair()
        with pytest.raises(Unreachable):
            await a.open_stream(STRANGER, "/echo")
        with pytest.raises(Unreachable):
            await a.open_stream(b.peer_id, "/nobody-serves-this")
        with pytest.raises(Unreachable):
            await a.connect(PeerAddress(STRANGER, (await dial(b)).maddrs))  # another key answers there
        with pytest.raises(Unreachable):
            await a.connect(PeerAddress(STRANGER, ()))
        with pytest.raises(Unreachable):
            await a.connect(PeerAddress(STRANGER, ("nonsense",)))
        with pytest.raises(Unreachable):
            await a.connect(await dial(a))

    run_lab(scenario)


def test_many_streams_at_once(run_lab):
    async def scenario(lab):
        a, b = await lab.pair({"/blob": blob_echo})

        async def one(number):
            stream = await a.open_stream(b.peer_id, "/blob")
            data = number.to_bytes(2, "little") * 5000
            await stream.write(len(data).to_bytes(4, "little") + data)
            assert await stream.read_exactly(len(data)) == data
            await stream.close()

        async with asyncio.TaskGroup() as group:
            for number in range(40):
                group.create_task(one(number))

    run_lab(scenario)


def test_the_last_bytes_of_a_responder_arrive(run_lab):
    async def scenario(lab):
        async def reply_and_return(stream):
            await stream.read_exactly(1)
            await stream.write(b"r" * 300_000)

        a, b = await lab.pair({"/reply": reply_and_return})
        for _ in range(5):
            stream = await a.open_stream(b.peer_id, "/reply")
            await stream.write(b"?")
            await asyncio.sleep(0.05)  # the responder has finished long before we read
            assert await stream.read_exactly(300_000) == b"r" * 300_000
            await stream.close()

    run_lab(scenario)


def test_an_end_is_unreachable_for_the_other_side(run_lab):
    async def scenario(lab):
        begun = asyncio.Queue()
        ends = asyncio.Queue()

        async def read_two(stream):
            assert await stream.read_exactly(1) == b"1"
            await begun.put(None)  # a reset may take back what was not read yet
            try:
                await stream.read_exactly(10)
            except Unreachable as error:
                await ends.put(error)
                raise

        a, b = await lab.pair({"/two": read_two})
        for end in ("close", "reset"):
            stream = await a.open_stream(b.peer_id, "/two")
            await stream.write(b"1")
            await begun.get()
            if end == "close":
                await stream.close()
            else:
                stream.reset()
                stream.reset()
            assert isinstance(await ends.get(), Unreachable)

    run_lab(scenario)


def test_a_reset_wakes_our_own_reader(run_lab):
    async def scenario(lab):
        a, b = await lab.pair({"/echo": echo})
        stream = await a.open_stream(b.peer_id, "/echo")

        async def read():
            with pytest.raises(Unreachable):
                await stream.read_exactly(4)

        async with asyncio.TaskGroup() as group:
            group.create_task(read())
            await asyncio.sleep(0.02)
            stream.reset()

    run_lab(scenario)


def test_cancelled_calls_leave_the_host_usable(run_lab, dial):
    async def scenario(lab):
        a, b = await lab.pair({"/echo": echo})

        async def open_and_reset():
            (await a.open_stream(b.peer_id, "/echo")).reset()

        async def dial_nobody():
            with pytest.raises(Unreachable):
                await a.connect(PeerAddress(STRANGER, (await dial(b)).maddrs))

        for delay_s in (0, 0.001, 0.012):
            tasks = lab.spawn(open_and_reset()), lab.spawn(dial_nobody())
            await asyncio.sleep(delay_s)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        stream = await a.open_stream(b.peer_id, "/echo")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await stream.read_exactly(4)
        await stream.write(b"ping")
        assert await stream.read_exactly(4) == b"ping"
        await stream.close()
        assert a.statistics().streams_open == 0

    run_lab(scenario)


def test_a_failing_handler_resets_its_stream_only(run_lab, caplog):
    async def scenario(lab):
        async def fault(stream):
            await stream.read_exactly(1)
            raise DecodeError("bad bytes")

        async def bug(stream):
            await stream.read_exactly(1)
            raise ZeroDivisionError

        a, b = await lab.pair({"/fault": fault, "/bug": bug, "/echo": echo})
        for protocol in ("/fault", "/bug"):
            stream = await a.open_stream(b.peer_id, protocol)
            await stream.write(b"x")
            with pytest.raises(Unreachable):
                await stream.read_exactly(1)
            stream.reset()
        assert [(peer, str(error)) for peer, error in lab.faults] == [(a.peer_id, "bad bytes")]
        stream = await a.open_stream(b.peer_id, "/echo")
        await stream.write(b"ping")
        assert await stream.read_exactly(4) == b"ping"
        await stream.close()

    run_lab(scenario)
    assert "handler of /bug failed" in caplog.text


def test_a_writer_waits_for_its_reader(run_lab):
    async def scenario(lab):
        go = asyncio.Event()
        size = 48 << 20

        async def slow(stream):
            await go.wait()
            for _ in range(48):
                await stream.read_exactly(1 << 20)
            await stream.write(b"done")

        a, b = await lab.pair({"/slow": slow})
        stream = await a.open_stream(b.peer_id, "/slow")
        writing = lab.spawn(stream.write(bytes(size)))
        for _ in range(10):
            await asyncio.sleep(0.05)
        assert not writing.done()
        assert a.statistics().bytes_up < size // 2
        go.set()
        await writing
        assert await stream.read_exactly(4) == b"done"
        await stream.close()

    run_lab(scenario)


def test_connections_and_events(run_lab):
    async def scenario(lab):
        b = await lab.host({"/echo": echo})
        a = await lab.host()
        at_a, at_b = a.events(), b.events()
        await a.connect(PeerAddress(b.peer_id, await b.addresses()))
        assert await wait_for(at_a, PeerConnected) == PeerConnected(b.peer_id)
        assert await wait_for(at_b, PeerConnected) == PeerConnected(a.peer_id)
        (connection,) = await a.connections()
        assert (connection.peer, connection.path) == (b.peer_id, Route.DIRECT)
        stream = await a.open_stream(b.peer_id, "/echo")
        await b.disconnect(a.peer_id)
        with pytest.raises(Unreachable):
            await stream.read_exactly(1)
        assert await wait_for(at_a, PeerDisconnected) == PeerDisconnected(b.peer_id)
        assert await wait_for(at_b, PeerDisconnected) == PeerDisconnected(a.peer_id)
        assert await a.connections() == ()
        await a.connect(PeerAddress(b.peer_id, await b.addresses()))
        assert await wait_for(at_a, PeerConnected) == PeerConnected(b.peer_id)

    run_lab(scenario)


def test_a_transport_that_dies_comes_back(run_lab, dial):
    async def scenario(lab):
        a, b = await lab.pair({"/echo": echo})
        before, events, at_a = await dial(b), b.events(), a.events()
        stream = await a.open_stream(b.peer_id, "/echo")
        await stream.write(b"ping")
        await stream.read_exactly(4)
        lab.kill_transport(b)
        with pytest.raises(Unreachable):
            await stream.read_exactly(1)
        stream.reset()
        assert await wait_for(events, PeerDisconnected) == PeerDisconnected(a.peer_id)
        with pytest.raises(Unreachable):
            await b.open_stream(a.peer_id, "/echo")
        with pytest.raises(Unreachable):
            await b.addresses()
        assert await b.connections() == ()
        assert await wait_for(events, HostRestarted) == HostRestarted(1)
        assert b.statistics().restarts == 1
        assert await dial(b) == before  # same PeerID, same port
        await wait_for(at_a, PeerDisconnected)  # else it would take the connection that is gone for one
        await a.connect(before)
        stream = await a.open_stream(b.peer_id, "/echo")  # the handler is still there
        await stream.write(b"ping")
        assert await stream.read_exactly(4) == b"ping"
        await stream.close()

    run_lab(scenario)


def test_our_streams_end_when_our_own_transport_dies(run_lab):
    async def scenario(lab):
        a, b = await lab.pair({"/echo": echo})
        streams = [await a.open_stream(b.peer_id, "/echo") for _ in range(3)]
        events = a.events()

        async def read(stream):
            with pytest.raises(Unreachable):
                await stream.read_exactly(1)

        async with asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(read(stream))
            await asyncio.sleep(0.02)
            lab.kill_transport(a)
        await wait_for(events, PeerDisconnected)
        assert a.statistics().streams_open == 0

    run_lab(scenario)


def test_the_end_of_serve_is_the_end_of_everything(run_lab):
    async def scenario(lab):
        a, b = await lab.pair({"/echo": echo})
        events = b.events()
        stream = await a.open_stream(b.peer_id, "/echo")
        await stream.write(b"ping")
        await stream.read_exactly(4)
        await lab.stop(b)
        with pytest.raises(Unreachable):
            await stream.read_exactly(1)
        with pytest.raises(Unreachable):
            await b.addresses()
        with pytest.raises(Unreachable):
            await b.open_stream(a.peer_id, "/echo")
        assert [type(event) async for event in events][-1:] == [PeerDisconnected]

    run_lab(scenario)


def test_handlers_may_be_set_while_serving(run_lab):
    async def scenario(lab):
        a, b = await lab.pair()
        b.set_handler("/late", echo)
        while True:
            try:
                stream = await a.open_stream(b.peer_id, "/late")
            except Unreachable:
                await asyncio.sleep(0.01)
            else:
                break
        await stream.write(b"ping")
        assert await stream.read_exactly(4) == b"ping"
        await stream.close()

    run_lab(scenario)


def test_one_identity_serves_once(run_lab, dial):
    async def scenario(lab):
        a, b = await lab.pair({"/echo": echo})
        assert a.peer_id != b.peer_id
        assert (await dial(a)).maddrs != (await dial(b)).maddrs
        if lab.transport == "memory":
            with pytest.raises(LocalFault):
                lab._network.host(a.peer_id)

    run_lab(scenario)
