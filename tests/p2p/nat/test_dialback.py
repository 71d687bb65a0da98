"""A dial-back tells a libp2p node from anything else, on TCP and on QUIC; real sockets on loopback."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from atoll.p2p.nat.dialback import answers
from atoll.p2p.transports.p2pd.p2pd_host import P2pdHost
from atoll.p2p.transports.p2pd.process import P2pdOptions
from atoll.protocols.identity import Identity
from tests.waiting import HANGS_S

LISTEN = ("/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1")


async def test_a_node_answers_on_both_transports():
    host, up = P2pdHost(Identity(b"d" * 32), P2pdOptions(listen=LISTEN)), asyncio.Event()
    async with asyncio.timeout(HANGS_S), asyncio.TaskGroup() as group:
        serving = group.create_task(host.serve(up.set))
        await up.wait()
        maddrs = await host.addresses()
        assert len(maddrs) == 2
        assert all([await answers(maddr) for maddr in maddrs])
        serving.cancel()
    assert not any([await answers(maddr) for maddr in maddrs])


@contextlib.asynccontextmanager
async def babbler(words: bytes) -> AsyncIterator[str]:
    """A TCP server that is no libp2p node."""

    def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(words)
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        yield f"/ip4/127.0.0.1/tcp/{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("words", [b"", b"SSH-2.0-OpenSSH_9.2\r\n", b"\x13/multistream/9.0.0\n"])
async def test_another_server_is_no_node(words):
    async with babbler(words) as maddr:
        assert not await answers(maddr)


class Parrot(asyncio.DatagramProtocol):
    """Sends everything back."""

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.transport.sendto(data, addr)


async def test_a_udp_echo_is_no_node():
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(Parrot, local_addr=("127.0.0.1", 0))
    port = transport.get_extra_info("sockname")[1]
    assert not await answers(f"/ip4/127.0.0.1/udp/{port}/quic-v1")
    transport.close()


@pytest.mark.parametrize("maddr", ["/dns4/example.org/tcp/1", "/memory/1", "nonsense", "/ip4/127.0.0.1/tcp/1"])
async def test_what_cannot_be_asked_is_no(maddr):
    assert not await answers(maddr)
