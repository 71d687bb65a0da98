"""What only p2pd can get wrong: orphans, files left behind, ports, torch in the daemon."""

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from atoll.p2p.host.interface import HostRestarted, PeerAddress
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.p2p.transports.p2pd import control_client
from atoll.p2p.transports.p2pd import private_folder as p2pd_folder
from atoll.p2p.transports.p2pd import process as p2pd_process
from atoll.p2p.transports.p2pd.control_client import P2pdControl
from atoll.p2p.transports.p2pd.p2pd_host import P2pdHost
from atoll.p2p.transports.p2pd.private_folder import make_own, private_folder
from atoll.p2p.transports.p2pd.process import P2pdOptions
from atoll.p2p.transports.p2pd.unix_socket import UnixSocket
from atoll.protocols.errors import LocalFault, Unreachable
from atoll.protocols.identity import Identity
from tests.chaos.stopped import stop_process
from tests.p2p.serving import serving
from tests.waiting import HANGS_S, eventually, poll

pytestmark = pytest.mark.network


@pytest.fixture
def tmp_path():
    """With a name that leaves room for the path of a socket, wherever pytest keeps its own folders."""
    with tempfile.TemporaryDirectory(prefix="p2pd-test-") as folder:
        yield Path(folder)


SERVE_FOREVER = """
import asyncio
from atoll.p2p.transports.p2pd.p2pd_host import P2pdHost
from atoll.protocols.identity import Identity
host = P2pdHost(Identity(b"k" * 32))
asyncio.run(host.serve(lambda: print(host.process_id, flush=True)))
"""
HEAVY = """
import sys
import atoll.p2p.rpc.calls, atoll.p2p.transports.p2pd.p2pd_host, atoll.p2p.transports.p2pd.schema as schema
schema.messages(), schema.binary()
print([name for name in ("torch", "hivemind", "libp2p") if name in sys.modules])
"""
BESIDE_LIBP2P = """
import atoll.p2p.transports.p2pd.schema as schema
schema.messages()
import libp2p.crypto.pb.crypto_pb2
print(schema.messages().Request(type=0).SerializeToString())
"""


def is_running(pid):
    """Whether a process (not a zombie) has this id."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def start_node(folder):
    environment = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", SERVE_FOREVER], stdout=subprocess.PIPE, text=True, env=environment
    )


def test_p2pd_dies_with_a_killed_node(tmp_path):
    with start_node(tmp_path) as node:
        pid = int(node.stdout.readline())
        assert is_running(pid)
        node.kill()
        node.wait()
        poll("p2pd is gone", lambda: not is_running(pid))
    (left,) = tmp_path.iterdir()  # nobody was left to remove it
    assert stat.S_IMODE(left.stat().st_mode) == 0o700
    assert not (left / "key").exists()


def test_p2pd_dies_with_a_killed_node_even_when_it_hangs(tmp_path):
    with start_node(tmp_path) as node:
        pid = int(node.stdout.readline())
        stop_process(pid)
        node.kill()
        node.wait()
        poll("p2pd is gone", lambda: not is_running(pid))


def test_folders_of_killed_nodes_are_removed_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(p2pd_folder, "_FRESH_S", 0.0)
    stale = tmp_path / "atoll-p2pd-stale"
    stale.mkdir()
    (stale / "lock").touch()
    os.utime(stale / "lock", (0, 0))
    with private_folder() as first, private_folder() as second:
        assert sorted(tmp_path.iterdir()) == sorted([first, second])
    assert list(tmp_path.iterdir()) == []


def test_a_long_temporary_folder_is_avoided(tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with private_folder() as folder:
        assert len(os.fsencode(folder / "control")) < 100
    assert not folder.exists()


def test_no_temporary_folder_is_a_line(monkeypatch):
    """As where /tmp is full: it was a traceback."""

    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", none)
    with pytest.raises(LocalFault, match="no temporary folder") as caught, private_folder():
        pass
    assert "TMPDIR" in caught.value.hint


def test_a_node_that_gets_an_interrupt_leaves_nothing(tmp_path):
    with start_node(tmp_path) as node:
        pid = int(node.stdout.readline())
        node.send_signal(signal.SIGINT)
        node.wait(HANGS_S)
        assert not is_running(pid)
    assert list(tmp_path.iterdir()) == []


async def test_a_port_in_use_is_a_local_fault():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        host = P2pdHost(Identity(b"k" * 32), P2pdOptions(listen=(f"/ip4/127.0.0.1/tcp/{port}",)))
        with pytest.raises(LocalFault, match=f"port {port} is in use") as caught:
            await host.serve(lambda: None)
        assert caught.value.hint


async def test_a_second_node_cannot_share_the_port_of_the_first():
    first = P2pdHost(Identity(b"k" * 32))
    async with serving(first):
        second = P2pdHost(Identity(b"l" * 32), P2pdOptions(listen=await first.addresses()))
        with pytest.raises(LocalFault, match="in use"):
            await second.serve(lambda: None)


async def test_a_senseless_listen_address_is_a_local_fault():
    for maddr in ("127.0.0.1:4001", "/ip4/192.0.2.1/tcp/4001"):
        with pytest.raises(LocalFault, match="listen"):
            await P2pdHost(Identity(b"k" * 32), P2pdOptions(listen=(maddr,))).serve(lambda: None)


async def test_what_p2pd_says_when_it_refuses_to_start(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    options = P2pdOptions(listen=("/ip4/127.0.0.1/udp/0",))  # no libp2p transport
    with pytest.raises(LocalFault, match=r"p2pd did not start: .+"):
        await P2pdHost(Identity(b"k" * 32), options).serve(lambda: None)
    assert list(tmp_path.iterdir()) == []


async def test_tcp_and_quic_listen_on_chosen_ports():
    options = P2pdOptions(listen=("/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1"))
    host = P2pdHost(Identity(b"k" * 32), options)
    async with serving(host):
        before = sorted(await host.addresses())
        assert [maddr.split("/")[3] for maddr in before] == ["tcp", "udp"]
        events = host.events()
        os.kill(host.process_id, signal.SIGKILL)
        async for event in events:
            if event == HostRestarted(1):
                break
        assert sorted(await host.addresses()) == before


async def test_p2pd_relays_for_nobody():
    a, b = P2pdHost(Identity(b"k" * 32)), P2pdHost(Identity(b"l" * 32))
    async with serving(a, b):
        await a.connect(PeerAddress(b.peer_id, await b.addresses()))
        with pytest.raises(Unreachable, match="protocols not supported"):
            await a.open_stream(b.peer_id, "/libp2p/circuit/relay/0.2.0/hop")


ROUTER = """
2026-11-22T15:50:56.848Z	DEBUG	nat	nat/nat.go:53	DiscoverGateway address:192.168.11.1
2026-11-22T15:50:56.848Z	DEBUG	nat	nat/nat.go:224	Attempting port map: tcp/20000
2026-11-22T15:50:56.952Z	DEBUG	nat	nat/nat.go:248	NAT Mapping: 35183 --> 20000 (tcp)
2026-11-22T15:50:57.067Z	DEBUG	nat	nat/nat.go:248	NAT Mapping: 35184 --> 20000 (udp)
"""
"""What p2pd printed behind a router with miniupnpd, in the lab of tests/rig."""
LOST = "2026-11-22T15:51:16.952Z	WARN	nat	nat/nat.go:233	failed to establish port mapping: no answer\n"


def printing(folder: Path, text: str) -> Path:
    """A p2pd that prints `text` first where the log of its port mapper is on, as it is behind a router."""
    script = folder / "p2pd"
    words = f"case $GOLOG_LOG_LEVEL in *nat=debug*) cat {folder}/text;; esac"
    (folder / "text").write_text(text)
    script.write_text(f'#!/bin/sh\n{words}\nexec {p2pd_process.binary()} "$@"\n')
    script.chmod(0o700)
    return script


@pytest.mark.parametrize(
    ("is_asked", "text", "ports"),
    [
        (True, ROUTER, {"tcp": 35183, "udp": 35184}),
        (True, "", {}),
        (True, ROUTER + LOST, {}),
        (True, ROUTER + LOST + ROUTER.replace("35183", "9"), {"tcp": 9, "udp": 35184}),
        (False, ROUTER, None),
    ],
)
async def test_the_router_s_ports_are_what_p2pd_s_port_mapper_says(tmp_path, monkeypatch, is_asked, text, ports):
    script = printing(tmp_path, text)
    monkeypatch.setattr(p2pd_process, "binary", lambda: script)
    host = P2pdHost(Identity(b"k" * 32), P2pdOptions(port_map=is_asked))
    async with serving(host):
        assert host.statistics().port_map == ports
    assert host.statistics().port_map == (None if ports is None else {}), "a p2pd that is gone holds no port"


async def test_it_comes_back_again_and_again():
    host = P2pdHost(Identity(b"k" * 32))
    async with serving(host):
        events = host.events()
        for number in (1, 2):
            os.kill(host.process_id, signal.SIGKILL)
            assert await anext(events) == HostRestarted(number)


async def test_a_full_temporary_folder_ends_no_node_and_p2pd_comes_back_when_there_is_room(monkeypatch):
    """p2pd dies, or is started anew to forget failed dials, while `/tmp` is full: it was a traceback."""
    host, seen = P2pdHost(Identity(b"k" * 32)), asyncio.Event()

    def full(self: Path, text: str) -> int:
        seen.set()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with serving(host), asyncio.timeout(HANGS_S / 10):
        events = host.events()
        with monkeypatch.context() as brief:
            brief.setattr(Path, "write_text", full)
            os.kill(host.process_id, signal.SIGKILL)
            await seen.wait()
        assert await anext(events) == HostRestarted(1)


async def test_a_full_temporary_folder_at_the_start_is_a_line(monkeypatch):
    def full(self: Path, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    refused = pytest.raises(LocalFault, match="no temporary folder: No space left")
    with monkeypatch.context() as brief, refused as caught:
        brief.setattr(Path, "write_text", full)
        await P2pdHost(Identity(b"k" * 32)).serve(lambda: None)
    assert "TMPDIR" in caught.value.hint


async def test_a_node_whose_temporary_folder_somebody_empties_comes_back(monkeypatch):
    """`rm -rf /tmp/*`: p2pd lives on, its sockets have no name any more, and nobody could reach the other."""

    async def answer(stream):
        await stream.write(b"!")

    a, b = P2pdHost(Identity(b"k" * 32), poll_s=0.05), P2pdHost(Identity(b"l" * 32))
    a.set_handler("/answer", answer)
    async with serving(a, b), asyncio.timeout(HANGS_S / 10):
        there, folder = PeerAddress(a.peer_id, await a.addresses()), a.control_socket.parent
        events = a.events()
        with monkeypatch.context() as brief:
            brief.setattr(control_client, "ANSWER_S", 0.5)
            shutil.rmtree(folder)
            assert await anext(events) == HostRestarted(1)
        await b.disconnect(a.peer_id)
        await b.connect(there)
        stream = await b.open_stream(a.peer_id, "/answer")
        assert await stream.read_exactly(1) == b"!"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


def test_a_folder_that_another_user_made_in_the_place_of_ours_is_not_taken(tmp_path, monkeypatch):
    """The key would be written there."""
    make_own(tmp_path / "ours")
    make_own(tmp_path / "ours")
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(PermissionError):
        make_own(tmp_path / "ours")


async def test_a_p2pd_that_hangs_is_ended_and_another_one_starts(monkeypatch):
    """A deadlock, or `kill -STOP`: the kernel still takes our connections, so nothing but silence shows it."""
    monkeypatch.setattr(p2pd_process, "_STOP_S", 0.1)
    a, b = P2pdHost(Identity(b"k" * 32), poll_s=0.05), P2pdHost(Identity(b"l" * 32), poll_s=1000.0)
    async with serving(a, b), asyncio.timeout(HANGS_S / 10):
        there = PeerAddress(b.peer_id, await b.addresses())
        await a.connect(there)
        events, hung = a.events(), a.process_id
        # Brief only until the event: a busy machine lets a p2pd in good health wait for longer.
        with monkeypatch.context() as brief:
            brief.setattr(control_client, "ANSWER_S", 0.5)
            stop_process(hung)
            async for event in events:
                if isinstance(event, HostRestarted):
                    break
        assert not is_running(hung)
        await a.connect(there)
        assert [each.peer for each in await a.connections()] == [b.peer_id]


async def test_a_p2pd_that_started_under_a_clock_far_ahead_is_ended_and_another_one_starts(monkeypatch):
    """A machine without a battery: peers refuse its certificate of QUIC for hours after the clock was right."""
    right = p2pd_process.clock_s
    monkeypatch.setattr(p2pd_process, "clock_s", lambda: right() + 6 * 3600.0)
    host = P2pdHost(Identity(b"k" * 32), poll_s=0.05)
    async with serving(host), asyncio.timeout(HANGS_S / 10):
        events, first = host.events(), host.process_id
        monkeypatch.setattr(p2pd_process, "clock_s", right)
        assert await anext(events) == HostRestarted(1)
        assert not is_running(first)
        again = host.process_id
        monkeypatch.setattr(p2pd_process, "clock_s", lambda: right() - 900.0)
        await asyncio.sleep(0.3)
        assert host.process_id == again, "a small correction is none"


async def test_no_request_waits_for_a_p2pd_that_hangs(monkeypatch):
    monkeypatch.setattr(p2pd_process, "_STOP_S", 0.1)
    host = P2pdHost(Identity(b"k" * 32), poll_s=1000.0)
    address = PeerAddress(Identity(b"l" * 32).peer_id, ("/ip4/192.0.2.1/tcp/7",))
    requests = (
        host.addresses,
        lambda: host.disconnect(address.peer),
        lambda: host.connect(address, 1.0),
    )
    async with serving(host), asyncio.timeout(HANGS_S / 10):
        monkeypatch.setattr(control_client, "ANSWER_S", 0.1)
        stop_process(host.process_id)
        for request in requests:
            with pytest.raises(Unreachable, match="p2pd did not answer within"):
                await request()
        assert await host.connections() == ()


async def test_a_crowd_of_busy_connections_does_not_push_out_one_that_is_favoured():
    """p2pd knows no members: of too many connections it closes old ones with few streams first."""

    async def stay(stream):
        await stream.write(b"!")
        await stream.read_exactly(1)

    a = P2pdHost(Identity(b"k" * 32), P2pdOptions(connections_low=1, connections_high=3, grace_s=1))
    a.set_handler("/stay", stay)
    member, *crowd = (P2pdHost(Identity(bytes([number]) * 32)) for number in range(5))
    async with serving(a, member, *crowd), asyncio.timeout(HANGS_S / 6):
        there, streams = PeerAddress(a.peer_id, await a.addresses()), []
        await member.connect(there)
        streams.append(await member.open_stream(a.peer_id, "/stay"))
        await streams[-1].read_exactly(1)
        await a.favour(member.peer_id)
        for host in crowd:
            with contextlib.suppress(Unreachable):  # p2pd may look while they come, and close some
                await host.connect(there)
                for _ in range(3):
                    streams.append(await host.open_stream(a.peer_id, "/stay"))
                    await streams[-1].read_exactly(1)

        async def left():
            found = [each.peer for each in await a.connections()]
            return found if len(found) <= 3 else None

        assert member.peer_id in await eventually(left)


async def test_dials_by_tcp_leave_from_ports_of_their_own(monkeypatch):
    """From the listening port, dials of two peers that lost each other cross when a cut heals, and both fail."""
    monkeypatch.delenv("LIBP2P_TCP_REUSEPORT", raising=False)
    a, b = P2pdHost(Identity(b"k" * 32)), P2pdHost(Identity(b"l" * 32))
    async with serving(a, b), asyncio.timeout(HANGS_S):
        await a.connect(PeerAddress(b.peer_id, await b.addresses()))
        (seen,) = [each for each in await b.connections() if each.peer == a.peer_id]
        assert "/tcp/" in seen.maddr
        assert seen.maddr not in await a.addresses()


async def test_p2pd_collects_garbage_early_unless_the_user_says_otherwise(monkeypatch):
    """Half of what lives instead of as much: 15 MB less of some 90 (docs/log)."""
    for wished, seen in ((None, b"GOGC=50"), ("100", b"GOGC=100")):
        monkeypatch.delenv("GOGC", raising=False)
        if wished:
            monkeypatch.setenv("GOGC", wished)
        host = P2pdHost(Identity(b"k" * 32))
        async with serving(host):
            assert seen in Path(f"/proc/{host.process_id}/environ").read_bytes().split(b"\0")


async def test_cancelled_while_it_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for delay_s in (0.0, 0.01, 0.05, 0.15):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await P2pdHost(Identity(b"k" * 32)).serve(lambda: None)
        assert list(tmp_path.iterdir()) == []


async def test_replies_survive_on_quic():
    """p2pd loses the tail of the side that closes first on QUIC: our responder waits for the initiator."""

    async def reply(stream):
        await stream.read_exactly(1)
        await stream.write(b"r" * 200_000)

    a = P2pdHost(Identity(b"k" * 32))
    b = P2pdHost(Identity(b"l" * 32), P2pdOptions(listen=("/ip4/127.0.0.1/udp/0/quic-v1",)))
    b.set_handler("/reply", reply)
    async with serving(a, b), asyncio.timeout(HANGS_S):
        await a.connect(PeerAddress(b.peer_id, await b.addresses()))
        for _ in range(20):
            stream = await a.open_stream(b.peer_id, "/reply")
            await stream.write(b"?")
            assert await stream.read_exactly(200_000) == b"r" * 200_000
            await stream.close()


@contextlib.asynccontextmanager
async def quic_pair():
    """A host with one QUIC connection, and a function that asks the other side on a stream of its own."""

    async def reply(stream):
        await stream.read_exactly(1)
        await stream.write(b"r" * 50)

    async def ask():
        stream = await a.open_stream(b.peer_id, "/reply")
        await stream.write(b"?")
        assert await stream.read_exactly(50) == b"r" * 50
        await stream.close()

    a = P2pdHost(Identity(b"k" * 32))
    b = P2pdHost(Identity(b"l" * 32), P2pdOptions(listen=("/ip4/127.0.0.1/udp/0/quic-v1",)))
    b.set_handler("/reply", reply)
    async with serving(a, b), asyncio.timeout(HANGS_S):
        await a.connect(PeerAddress(b.peer_id, await b.addresses()))
        yield a, ask


async def test_a_quic_connection_takes_any_number_of_streams(monkeypatch):
    """p2pd leaks the place of a stream that ends in another way: from about the 300th on all would hang."""
    replaced = []
    async with quic_pair() as (a, ask):
        monkeypatch.setattr(a, "disconnect", replaced.append)
        for _ in range(110):
            await asyncio.gather(*(ask() for _ in range(10)))
    assert replaced == []


async def test_a_quic_connection_that_takes_no_more_streams_is_replaced(monkeypatch):
    """Where each end leaks, as on a system on which a byte left unread is no reset."""
    monkeypatch.setattr("atoll.p2p.transports.p2pd.p2pd_host.OPEN_S", 1.0)
    monkeypatch.setattr(UnixSocket, "_look", lambda found: found._take(1))

    async def until_answered(ask):
        while True:
            with contextlib.suppress(Unreachable):
                return await ask()

    async with quic_pair() as (_, ask):
        for _ in range(40):
            await asyncio.gather(*(until_answered(ask) for _ in range(10)))


async def test_streams_that_hang_together_replace_their_connection_once(monkeypatch):
    calls, (host, peer) = [], (P2pdHost(Identity(b"k" * 32)), Identity(b"l" * 32).peer_id)

    class Control:
        async def open_stream(self, peer, protocol):
            await asyncio.Event().wait()

        async def list_peers(self):
            return (peer, "/ip4/192.0.2.1/udp/7/quic-v1"), (host.peer_id, "/ip4/192.0.2.2/udp/7/quic-v1")

        async def disconnect(self, peer):
            calls.append(("disconnect", peer))

        async def connect(self, peer, maddrs, within_s):
            calls.append((peer, *maddrs))

    monkeypatch.setattr("atoll.p2p.transports.p2pd.p2pd_host.OPEN_S", 0.05)
    monkeypatch.setattr(host, "_live", Control)
    monkeypatch.setattr(host, "_control", Control())
    replaced = [("disconnect", peer), (peer, "/ip4/192.0.2.1/udp/7/quic-v1")]
    for times in (1, 2):
        hung = await asyncio.gather(*(host.open_stream(peer, "/any") for _ in range(3)), return_exceptions=True)
        assert {type(each) for each in hung} == {Unreachable}
        assert calls == replaced * times, "once for all three, and again for the next that hang"


async def test_a_connection_is_replaced_at_addresses_where_its_peer_listens(monkeypatch):
    """Its remote address is no such address where the peer dialled by TCP: that dial had a port of its own."""
    monkeypatch.delenv("LIBP2P_TCP_REUSEPORT", raising=False)
    quic = ("/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1")
    a, b = P2pdHost(Identity(b"k" * 32), P2pdOptions(listen=quic)), P2pdHost(Identity(b"l" * 32))
    c = P2pdHost(Identity(b"m" * 32), P2pdOptions(listen=quic[1:]))
    async with serving(a, b, c), asyncio.timeout(HANGS_S):
        connect, dials = a.connect, []
        tcp, udp = sorted(await a.addresses())

        async def noted(address):
            dials.append(address.maddrs)
            await connect(address)

        monkeypatch.setattr(a, "connect", noted)
        await b.connect(PeerAddress(a.peer_id, (tcp,)))
        await c.connect(PeerAddress(a.peer_id, (udp,)))
        await a._replacements.replace(a, b.peer_id, 0.0)
        await a._replacements.replace(a, c.peer_id, 0.0)
        assert dials == [(), await c.addresses()], "nothing, and the QUIC address: p2pd knows what a peer names"
        assert {each.peer for each in await a.connections()} == {b.peer_id, c.peer_id}
        await a.disconnect(b.peer_id)
        await connect(PeerAddress(b.peer_id, await b.addresses()))
        await a._replacements.replace(a, b.peer_id, asyncio.get_running_loop().time())
        assert dials[2:] == [await b.addresses()], "where it was dialled before"


async def test_one_peer_cannot_take_all_streams(monkeypatch):
    monkeypatch.setattr("atoll.p2p.transports.host_base.STREAMS_PER_PEER", 3)

    async def stay(stream):
        await stream.write(b"!")
        await stream.read_exactly(1)

    a, b = P2pdHost(Identity(b"k" * 32)), P2pdHost(Identity(b"l" * 32))
    b.set_handler("/stay", stay)
    async with serving(a, b):
        await a.connect(PeerAddress(b.peer_id, await b.addresses()))
        streams = []
        for _ in range(3):
            streams.append(await a.open_stream(b.peer_id, "/stay"))
            await streams[-1].read_exactly(1)
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


def run_python(source):
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_p2pd_itself_ends_a_dial_that_hangs_in_time(monkeypatch):
    """It goes on with a dial whose caller has gone, and joins a new dial to it."""
    sent = []

    async def request(self, message):
        sent.append((round(asyncio.get_running_loop().time(), 2), message.connect.timeout))
        await asyncio.Event().wait()

    async def dial_thrice():
        control, peer = P2pdControl("nowhere"), Identity(b"k" * 32).peer_id
        for within_s, patience_s in ((1.2, 0.3), (30.0, 0.9), (3.2, 2.0)):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await control.connect(peer, ["/ip4/127.0.0.1/tcp/1"], within_s)

    monkeypatch.setattr(P2pdControl, "_request", request)
    run_virtual(dial_thrice())
    (_, first), (_, joined), (late_s, last) = sent
    assert (first, joined, last) == (2, 1, 4), "one that joins does not make the first last longer"
    assert late_s == 2.25, "where less than a second is left, it waits for the end"


def test_the_daemon_stays_light():
    assert run_python(HEAVY) == "[]"


def test_the_schema_lives_beside_libp2p():
    assert run_python(BESIDE_LIBP2P) == repr(b"\x08\x00")


async def test_a_lonely_host_forgets_failed_dials_and_a_connected_one_stays():
    a, b = P2pdHost(Identity(b"k" * 32)), P2pdHost(Identity(b"l" * 32))
    async with asyncio.timeout(HANGS_S), serving(a, b):
        events, process = a.events(), a.process_id
        await a.forget_failures()
        async for event in events:
            if isinstance(event, HostRestarted):
                break
        assert a.process_id != process
        assert a.statistics().restarts == 0, "nobody died"
        await a.connect(PeerAddress(b.peer_id, await b.addresses()))
        process = a.process_id
        await a.forget_failures()
        assert a.process_id == process
        assert [connection.peer for connection in await a.connections()] == [b.peer_id]


async def test_ip6_by_tcp_and_quic():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("NOT TESTED: this machine has no IPv6 loopback")
    for place in ("tcp/0", "udp/0/quic-v1"):
        a, b = (P2pdHost(Identity(key * 32), P2pdOptions(listen=(f"/ip6/::1/{place}",))) for key in (b"k", b"l"))
        async with asyncio.timeout(HANGS_S), serving(a, b):
            await a.connect(PeerAddress(b.peer_id, await b.addresses()))
            (connection,) = await a.connections()
            assert connection.maddr.startswith("/ip6/::1/")
