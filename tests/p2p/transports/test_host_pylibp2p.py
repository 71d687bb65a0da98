"""What only py-libp2p can get wrong: trio beside asyncio, its quirks, hostile peers, the company of p2pd."""

import asyncio
import contextlib
import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading

import msgspec
import pytest
import trio
from libp2p.stream_muxer.yamux.yamux import Yamux, YamuxStream

from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.rpc.calls import Calls
from atoll.p2p.swarm.swarm import Swarm
from atoll.p2p.transports.p2pd.p2pd_host import P2pdHost
from atoll.p2p.transports.p2pd.process import P2pdOptions
from atoll.p2p.transports.pylibp2p import connection as pylibp2p_link
from atoll.p2p.transports.pylibp2p import engine as pylibp2p_engine
from atoll.p2p.transports.pylibp2p import trio_bridge
from atoll.p2p.transports.pylibp2p.connection import Upgrader
from atoll.p2p.transports.pylibp2p.options import PyLibp2pOptions, refused_listen, unsupported
from atoll.p2p.transports.pylibp2p.pylibp2p_host import PyLibp2pHost
from atoll.p2p.transports.pylibp2p.trio_bridge import trio_guest
from atoll.protocols.errors import LocalFault, Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round, RunId, digest
from atoll.protocols.ledger.records import Ack
from tests.p2p.serving import serving
from tests.waiting import HANGS_S, eventually

pytestmark = pytest.mark.network

RUN = RunId(digest(b"run of the py-libp2p tests"))
HEAVY = """
import sys
import atoll.p2p.rpc.calls, atoll.p2p.transports.pylibp2p.pylibp2p_host as it, atoll.protocols.identity as identity
it.PyLibp2pHost(identity.Identity(bytes(32)))
print([name for name in ("torch", "hivemind", "libp2p", "trio") if name in sys.modules])
"""


def identity(number):
    return Identity(bytes([number]) * 32)


def pure(number=1, **options):
    return PyLibp2pHost(identity(number), PyLibp2pOptions(**options))


async def address_of(host):
    return PeerAddress(host.peer_id, await host.addresses())


async def digest_of(stream):
    """u32 size, bytes; their digest comes back."""
    left, hasher = int.from_bytes(await stream.read_exactly(4), "little"), hashlib.sha256()
    while left:
        part = await stream.read_exactly(min(left, 1 << 20))
        hasher.update(part)
        left -= len(part)
    await stream.write(hasher.digest())


async def digest_by(a, b, data):
    stream = await a.open_stream(b.peer_id, "/digest")
    await stream.write(len(data).to_bytes(4, "little"))
    await stream.write(data)
    reply = await stream.read_exactly(32)
    await stream.close()
    return reply


async def stay(stream):
    await stream.write(b"!")
    with contextlib.suppress(Unreachable):
        await stream.read_exactly(1)


# In the company of p2pd.


class Word(msgspec.Struct, frozen=True):
    text: str


async def test_both_implementations_in_one_process_exchange_calls_and_streams():
    data = random.Random(1).randbytes(8 << 20)
    mine, theirs = pure(), P2pdHost(identity(2))
    for host in (mine, theirs):
        host.set_handler("/digest", digest_of)
    async with serving(mine, theirs), asyncio.TaskGroup() as group:
        calls = {host: Calls(host, RUN) for host in (mine, theirs)}
        for host, each in calls.items():

            async def answer(peer, word, *, tag=host.peer_id):
                return Word(f"{word.text} from {peer} to {tag}")

            each.register("say", Word, Word, answer)
        tasks = [group.create_task(each.serve()) for each in calls.values()]
        await asyncio.sleep(0)
        for dialler, other in ((mine, theirs), (theirs, mine)):
            await dialler.connect(await address_of(other))
            for a, b in ((mine, theirs), (theirs, mine)):
                reply = await calls[a].call(b.peer_id, "say", Word("hello"), Word)
                assert reply == Word(f"hello from {a.peer_id} to {b.peer_id}")
                assert await digest_by(a, b, data) == hashlib.sha256(data).digest()
            (seen,) = await mine.connections()
            assert seen.peer == theirs.peer_id
            await dialler.disconnect(other.peer_id)
            await eventually(lambda: no_connections(mine, theirs))
        for task in tasks:
            task.cancel()


async def no_connections(*hosts):
    return not any([await host.connections() for host in hosts])


async def test_a_mixed_swarm_exchanges_entries_and_a_blob(tmp_path):
    data = random.Random(2).randbytes((3 << 20) + 5)
    hosts = pure(1), P2pdHost(identity(2))
    async with serving_one(hosts[0], tmp_path, 1) as one:
        seed = await address_of(hosts[0])
        async with serving_one(hosts[1], tmp_path, 2, seed) as two, asyncio.timeout(HANGS_S):
            await two.wait_synced()
            blob = one.blobs.store.add_bytes(data)
            back = two.blobs.store.add_bytes(data[::-1])
            for number, swarm in enumerate((one, two)):
                swarm.publish(Ack(Round(number), digest(b"set"), blob))
            await eventually(lambda: equal_ledgers(one, two))
            assert (await two.fetch(blob, [hosts[0].peer_id], 4 << 20)).read_bytes() == data
            assert (await one.fetch(back, [hosts[1].peer_id], 4 << 20)).read_bytes() == data[::-1]
            assert not any(row.faults for swarm in (one, two) for row in swarm.peers())


async def equal_ledgers(one, two):
    return one.ledger.vector() == two.ledger.vector() and len(one.ledger.vector()) == 2


@contextlib.asynccontextmanager
async def serving_one(host, root, number, *seeds):
    swarm = Swarm(
        host=host,
        identity=identity(number),
        run=RUN,
        home=root / str(number),
        seeds=seeds,
        rng=random.Random(number),
    )
    async with serving(swarm):
        yield swarm


async def test_connections_carry_the_address_that_the_peer_comes_from():
    a, b = pure(1), pure(2)
    async with serving(a, b):
        await a.connect(await address_of(b))
        (at_a,), (at_b,) = await a.connections(), await b.connections()
        assert at_a.maddr in await b.addresses()
        (link,) = a._engine.links()
        host, port = link._wire._stream.socket.getsockname()
        assert at_b.maddr == f"/ip4/{host}/tcp/{port}"


async def test_a_peer_that_falls_silent_is_noticed():
    mine, theirs = pure(keepalive_s=1.0), P2pdHost(identity(2))
    async with serving(mine, theirs):
        await mine.connect(await address_of(theirs))
        (link,) = mine._engine.links()
        await eventually(lambda: link._muxer._ping_id > 1)
        assert len(await mine.connections()) == 1, "answered pings keep it"
        os.kill(theirs.process_id, signal.SIGSTOP)
        try:
            await eventually(lambda: no_connections(mine))
        finally:
            os.kill(theirs.process_id, signal.SIGCONT)


# What is asked of it.


def test_nothing_heavy_is_imported_before_it_serves():
    done = subprocess.run([sys.executable, "-c", HEAVY], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_it_cannot_do_is_refused_with_a_reason():
    wished = ("hole_punching", "port_map", "relays", "relay_service", "quic")
    for name, reason in zip(wished, unsupported(wished), strict=True):
        assert reason.startswith(f"{name}: ")
    assert unsupported(("listen", "announce")) == []
    assert refused_listen(("/ip4/0.0.0.0/tcp/4001", "/ip6/::/tcp/0")) == []


@pytest.mark.parametrize(
    "maddr",
    ["/ip4/127.0.0.1/udp/0/quic-v1", "/ip4/127.0.0.1/tcp/0/ws", "127.0.0.1:4001", "/ip4/192.0.2.1/tcp/4001"],
)
async def test_an_address_it_cannot_listen_on_is_a_local_fault(maddr):
    with pytest.raises(LocalFault, match="listen"):
        await pure(listen=(maddr,)).serve(lambda: None)


async def test_a_port_in_use_is_a_local_fault():
    first = pure(1)
    async with serving(first):
        with pytest.raises(LocalFault, match="in use") as caught:
            await pure(2, listen=await first.addresses()).serve(lambda: None)
        assert caught.value.hint


async def test_it_listens_on_every_interface_and_says_so():
    host = pure(listen=("/ip4/0.0.0.0/tcp/0",))
    async with serving(host):
        maddrs = await host.addresses()
        assert [maddr for maddr in maddrs if maddr.startswith("/ip4/127.0.0.1/tcp/")]
        assert not [maddr for maddr in maddrs if "0.0.0.0" in maddr or maddr.endswith("/0")]
    announced = pure(listen=("/ip4/127.0.0.1/tcp/0",), announce=("/dns4/example.org/tcp/4001",))
    async with serving(announced):
        assert await announced.addresses() == ("/dns4/example.org/tcp/4001",)


async def test_addresses_it_cannot_dial_are_named_and_the_others_tried():
    a, b = pure(1), pure(2)
    async with serving(a, b):
        bad = ("/ip4/127.0.0.1/udp/1/quic-v1", "nonsense", "/ip4/127.0.0.1/tcp/1")
        with pytest.raises(Unreachable, match=r"plain TCP only.*not a multiaddr.*cannot connect"):
            await a.connect(PeerAddress(b.peer_id, bad))
        (good,) = await b.addresses()
        port = good.rsplit("/", 1)[1]
        await a.connect(PeerAddress(b.peer_id, (*bad, f"/dns4/localhost/tcp/{port}")))
        assert len(await a.connections()) == 1


# Hostile or broken peers.


def raw_connection(host_maddr):
    return asyncio.open_connection("127.0.0.1", int(host_maddr.rsplit("/", 1)[1]))


async def test_garbage_on_the_port_hurts_nobody(monkeypatch):
    noise = random.Random(3)
    talks = [
        b"",
        noise.randbytes(100_000),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 9 + b"\x01",
        b"\x13/multistream/1.0.0\n\xff\xff\xff\xff\x0f" + bytes(1000),
        b"\x13/multistream/1.0.0\n\x07/noise\n" + b"\xff\xff" + noise.randbytes(70_000),
        b"\x13/multistream/1.0.0\n" + b"\x03ls\n" * 5000,
    ]
    a, b = pure(1), pure(2)
    b.set_handler("/digest", digest_of)
    async with serving(a, b):
        (maddr,) = await b.addresses()
        with monkeypatch.context() as brief:
            brief.setattr(pylibp2p_link, "HANDSHAKE_S", 0.3)
            for talk in talks:
                reader, writer = await raw_connection(maddr)
                with contextlib.suppress(ConnectionError):
                    writer.write(talk)
                    await writer.drain()
                    async with asyncio.timeout(HANGS_S):
                        while await reader.read(1 << 16):
                            pass  # hung up within the deadline of the handshake, also when we stay silent
                writer.close()
        await a.connect(await address_of(b))
        assert await digest_by(a, b, b"x" * 1000) == hashlib.sha256(b"x" * 1000).digest()
        assert len(await b.connections()) == 1


@pytest.mark.parametrize("protocol", [b"/plaintext/2.0.0", b"/secio/1.0.0", b"/tls/1.0.0"])
async def test_only_noise_is_spoken(protocol):
    host = pure()
    async with serving(host):
        (maddr,) = await host.addresses()
        reader, writer = await raw_connection(maddr)
        writer.write(b"\x13/multistream/1.0.0\n" + bytes([len(protocol) + 1]) + protocol + b"\n")
        async with asyncio.timeout(HANGS_S):
            assert await reader.readexactly(20 + 4) == b"\x13/multistream/1.0.0\n\x03na\n"
        writer.close()


async def test_unfinished_handshakes_of_one_address_are_few():
    host = pure()
    async with serving(host):
        (maddr,) = await host.addresses()
        links = [await raw_connection(maddr) for _ in range(pylibp2p_engine._HANDSHAKES_PER_HOST + 5)]
        hung_up = 0
        for reader, _ in links[-5:]:
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(HANGS_S):
                    while await reader.read(100):
                        pass
            hung_up += 1
        assert hung_up == 5
        for _, writer in links:
            writer.close()


async def test_connections_are_limited():
    hosts = [pure(number) for number in (1, 2, 3)]
    full = pure(9, connections_max=2)
    async with serving(full, *hosts):
        for host in hosts:
            with contextlib.suppress(Unreachable):  # refused after the handshake: the dialler may see it later
                await host.connect(await address_of(full))
        await eventually(lambda: no_connections(hosts[2]))
        assert len(await full.connections()) == 2


async def test_one_peer_cannot_take_all_streams(monkeypatch):
    monkeypatch.setattr("atoll.p2p.transports.host_base.STREAMS_PER_PEER", 3)
    a, b = pure(1), pure(2)
    b.set_handler("/stay", stay)
    async with serving(a, b):
        await a.connect(await address_of(b))
        streams = [await a.open_stream(b.peer_id, "/stay") for _ in range(3)]
        for stream in streams:
            await stream.read_exactly(1)
        refused = await a.open_stream(b.peer_id, "/stay")
        with pytest.raises(Unreachable):
            await refused.read_exactly(1)
        refused.reset()
        await streams.pop().close()
        await eventually(lambda: b.statistics().streams_open == 2)
        streams.append(await a.open_stream(b.peer_id, "/stay"))
        assert await streams[-1].read_exactly(1) == b"!"
        for stream in streams:
            stream.reset()


async def test_a_peer_that_ignores_the_window_loses_its_connection():
    host = pure()

    async def never_read(stream):
        await asyncio.get_running_loop().create_future()

    host.set_handler("/stay", never_read)

    async def flood(address):
        place = address.maddrs[0].split("/")
        stream = await trio.open_tcp_stream(place[2], int(place[4]))
        link = await Upgrader(b"f" * 32, 10.0).link(stream, address.peer)
        sent = 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.run, pylibp2p_engine.Multiselect(), None)
            lane = await link.open("/stay")
            with contextlib.suppress(Exception):
                while sent < 256 << 20:
                    lane._stream.send_window = 1 << 20
                    await lane.write(bytes(1 << 20))
                    sent += 1 << 20
            nursery.cancel_scope.cancel()
        return sent

    async with serving(host), trio_guest() as guest, asyncio.timeout(HANGS_S):
        address = await address_of(host)
        sent = await guest.call(lambda: flood(address))
        assert sent < 64 << 20
        await eventually(lambda: no_connections(host))


# Its quirks.


def test_what_we_override_still_exists():
    for name in ("_write_frame", "_read_data_body", "_measure_rtt_loop", "accept_stream", "open_stream"):
        assert callable(getattr(Yamux, name))
    for name in ("reset", "close", "write", "send_window_update"):
        assert callable(getattr(YamuxStream, name))


async def test_a_writer_outlasts_a_reader_that_stops_for_longer_than_yamux_waits():
    go = asyncio.Event()

    async def slow(stream):
        await go.wait()
        await digest_of(stream)

    a, b = pure(1), pure(2)
    b.set_handler("/digest", slow)
    data = random.Random(4).randbytes(24 << 20)
    async with serving(a, b), asyncio.timeout(HANGS_S), asyncio.TaskGroup() as group:
        await a.connect(await address_of(b))
        digesting = group.create_task(digest_by(a, b, data))
        await asyncio.sleep(5.5)  # yamux gives up after 5 s
        assert not digesting.done()
        go.set()
        assert await digesting == hashlib.sha256(data).digest()


async def test_cancelled_writers_and_openers_do_not_break_the_connection():
    a, b = pure(1), pure(2)
    b.set_handler("/digest", digest_of)
    data = random.Random(5).randbytes(2 << 20)

    async def interrupted(delay_s):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                stream = await a.open_stream(b.peer_id, "/digest")
                try:
                    await stream.write((len(data) * 9).to_bytes(4, "little") + data * 8)
                finally:
                    stream.reset()

    async with serving(a, b), asyncio.timeout(HANGS_S):
        await a.connect(await address_of(b))
        delays = random.Random(6)
        async with asyncio.TaskGroup() as group:
            for _ in range(40):
                group.create_task(interrupted(delays.uniform(0, 0.08)))
            for _ in range(3):
                assert await digest_by(a, b, data) == hashlib.sha256(data).digest()
        assert await digest_by(a, b, data) == hashlib.sha256(data).digest()
        assert len(await a.connections()) == 1
        assert a.statistics().streams_open == 0
        (link,) = a._engine.links()
        await eventually(lambda: forgotten(link))


async def forgotten(link):
    muxer = link._muxer
    return not muxer.streams and not muxer.stream_buffers and muxer.stream_backlog_semaphore.value == 256


async def test_streams_leave_nothing_behind():
    a, b = pure(1), pure(2)
    b.set_handler("/digest", digest_of)
    async with serving(a, b):
        await a.connect(await address_of(b))
        for _ in range(300):  # more than the 256 that yamux lets be open at once
            await digest_by(a, b, b"x")
        for host in (a, b):
            (link,) = host._engine.links()
            await eventually(lambda link=link: forgotten(link))


# Trio beside asyncio.


async def test_cancellation_crosses_both_ways():
    ended = []

    async def sleeper():
        try:
            await trio.sleep_forever()
        finally:
            ended.append("sleeper")

    async def late():
        with trio.CancelScope(shield=True):
            began.set()
            while not may_end.is_set():  # noqa: ASYNC110 - an event of asyncio
                await trio.sleep(0.001)
        return "late"

    async def faulty():
        raise LocalFault("of the callee")

    async def short_lived():
        async with trio.open_nursery() as nursery:
            opened.set_result(nursery)
            await trio.sleep(0.05)
            nursery.cancel_scope.cancel()

    async with trio_guest() as guest:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await guest.call(sleeper)
        assert ended == ["sleeper"]
        lost, began, may_end = [], asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            calling = group.create_task(guest.call(late, lost=lost.append))
            await began.wait()
            calling.cancel()
            await asyncio.sleep(0)
            may_end.set()
        assert lost == ["late"]
        with pytest.raises(LocalFault, match="of the callee"):
            await guest.call(faulty)
        opened = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as group:
            group.create_task(guest.call(short_lived))
            nursery = await opened
            with pytest.raises(Unreachable):
                await guest.call(sleeper, within=nursery)
            with pytest.raises(Unreachable):
                await guest.call(sleeper, within=nursery)  # it has ended


async def test_one_trio_run_serves_all_hosts_and_ends_with_the_last():
    loop = asyncio.get_running_loop()
    for _ in range(2):
        async with serving(pure(1)):
            run = trio_bridge._guests[loop]
            async with serving(pure(2)):
                assert trio_bridge._guests[loop] is run
            assert not run.done.done()
        assert run.done.done()
        assert loop not in trio_bridge._guests
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def test_cancelled_while_it_starts():
    for delay_s in (0.0, 0.001, 0.003, 0.01):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await pure().serve(lambda: None)
        assert not trio_bridge._guests


async def test_a_dial_ends_with_its_deadline():
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        host = pure()
        async with serving(host):
            where = PeerAddress(identity(2).peer_id, (f"/ip4/127.0.0.1/tcp/{deaf.getsockname()[1]}",))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await host.connect(where)
            assert not host._engine.nursery.child_tasks - {*accepting(host)}
    assert threading.active_count() < 20


def accepting(host):
    """The tasks that an idle engine has."""
    return [task for task in host._engine.nursery.child_tasks if "_accept" in task.name]


async def test_it_serves_beside_a_p2pd_that_listens_on_the_same_number():
    """Another protocol's port is not ours: TCP is free where p2pd listens on UDP."""
    theirs = P2pdHost(identity(2), P2pdOptions(listen=("/ip4/127.0.0.1/udp/0/quic-v1",)))
    async with serving(theirs):
        (maddr,) = await theirs.addresses()
        port = maddr.split("/")[4]
        mine = pure(listen=(f"/ip4/127.0.0.1/tcp/{port}",))
        async with serving(mine):
            with pytest.raises(Unreachable, match="plain TCP only"):
                await mine.connect(await address_of(theirs))
