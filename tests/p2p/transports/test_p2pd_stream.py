"""Streams whose p2pd hung up: on the loop of `node start` and on asyncio's own."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import uvloop

from atoll.p2p.transports.host_base import StreamRegistry
from atoll.p2p.transports.p2pd import p2pd_stream
from atoll.p2p.transports.p2pd.control_client import P2pdControl, Socket
from atoll.p2p.transports.p2pd.p2pd_stream import P2pdStream
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


async def reset_socket() -> Socket:
    """A connection that p2pd ended without having read all: a reset, which closes the transport at once."""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    writer.write(b"never read")
    await asyncio.sleep(0)
    theirs.close()
    with suppress(OSError):
        await writer.wait_closed()
    return Socket(reader, writer)


@LOOPS
def test_a_stream_over_a_connection_that_was_reset_is_unreachable(loop):
    async def write() -> None:
        stream = P2pdStream(PEER, "/x", StreamRegistry(), await reset_socket(), initiator=True)
        with pytest.raises(Unreachable):
            await stream.write(b"x")
        with pytest.raises(Unreachable):
            await stream.read_exactly(1)
        await stream.close()

    run(loop, write)


@LOOPS
def test_a_request_over_a_connection_that_was_reset_is_unreachable(loop, monkeypatch):
    async def request() -> None:
        found = await reset_socket()

        async def opened(*_: object, **__: object) -> Socket:
            return found

        monkeypatch.setattr(asyncio, "open_unix_connection", opened)
        with pytest.raises(Unreachable):
            await P2pdControl("/p2pd.sock").list_peers()

    run(loop, request)


@LOOPS
def test_a_close_does_not_wait_for_ever_for_a_peer_that_reads_nothing(loop, monkeypatch):
    monkeypatch.setattr(p2pd_stream, "LINGER_S", 0.2)

    async def close() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            streams = StreamRegistry()
            found = Socket(*await asyncio.open_unix_connection(sock=ours))
            stream = P2pdStream(PEER, "/x", streams, found, initiator=True)
            # More than the socket holds, and no more than a stream may hold: the rest waits in the transport.
            await stream.write(bytes(p2pd_stream.BUFFER_BYTES))
            while not found.writer.transport.get_write_buffer_size():
                await stream.write(bytes(p2pd_stream.BUFFER_BYTES // 4))
            async with asyncio.timeout(HANGS_S / 10):
                await stream.close()
            assert streams.open == {}
            assert found.writer.transport.is_closing()

    run(loop, close)
