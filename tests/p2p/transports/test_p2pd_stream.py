"""Streams whose p2pd hung up: on the loop of `node start` and on asyncio's own."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from atoll.p2p.transports import host_base
from atoll.p2p.transports.host_base import StreamRegistry
from atoll.p2p.transports.p2pd.control_client import P2pdControl
from atoll.p2p.transports.p2pd.p2pd_stream import P2pdStream
from atoll.p2p.transports.p2pd.unix_socket import UnixSocket
from atoll.protocols.errors import Unreachable
from atoll.protocols.identity import Identity
from tests.waiting import HANGS_S

PEER = Identity(bytes([7]) * 32).peer_id
LOOPS = pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop])


def run(loop: Callable[[], asyncio.AbstractEventLoop], work: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(HANGS_S):
            await work()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(within())


async def reset_socket() -> UnixSocket:
    """A connection that p2pd ended without having read all."""
    ours, theirs = socket.socketpair()
    found = UnixSocket(ours)
    await found.write(b"never read")
    theirs.close()
    return found


@LOOPS
def test_a_stream_over_a_connection_that_was_reset_is_unreachable(loop):
    async def write() -> None:
        stream = P2pdStream(PEER, "/x", StreamRegistry(), await reset_socket(), initiator=True)
        with pytest.raises(Unreachable):
            await stream.write(b"x")
        with pytest.raises(Unreachable):
            await stream.read_exactly(1)
        await stream.close()
        with pytest.raises(Unreachable):
            await stream.read_exactly(1)

    run(loop, write)


@LOOPS
def test_a_request_over_a_connection_that_was_reset_is_unreachable(loop, monkeypatch):
    async def request() -> None:
        found = await reset_socket()

        async def connected(*_: object) -> UnixSocket:
            return found

        monkeypatch.setattr(UnixSocket, "connect", connected)
        with pytest.raises(Unreachable):
            await P2pdControl("/p2pd.sock").list_peers()

    run(loop, request)


@LOOPS
def test_a_responder_waits_for_a_bounded_time_for_an_initiator_that_does_not_end(loop, monkeypatch):
    monkeypatch.setattr(host_base, "LINGER_S", 0.2)

    async def close() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            streams = StreamRegistry()
            stream = P2pdStream(PEER, "/x", streams, UnixSocket(ours), initiator=False)
            await stream.write(b"x")
            async with asyncio.timeout(HANGS_S / 10):
                await stream.close()
            assert streams.open == {}
            assert theirs.recv(2) == b"x"
            assert theirs.recv(1) == b""

    run(loop, close)
