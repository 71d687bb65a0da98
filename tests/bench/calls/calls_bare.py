"""Child of `bench calls`: one side of an echo over p2pd's own unary calls, with nothing of ours above them.

p2pd carries unary calls over one persistent control connection. This is the least that a Python process can do
with it: no types, no checks, no deadlines. hivemind's client does the same and more, and needs torch.
"""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import uvloop
from google.protobuf import message_factory

from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.transports.host_base import BUFFER_BYTES
from atoll.p2p.transports.p2pd.control_client import read_message, varint
from atoll.p2p.transports.p2pd.p2pd_host import P2pdHost
from atoll.p2p.transports.p2pd.schema import messages
from atoll.protocols.errors import LocalFault
from atoll.protocols.ids import PeerId, peer_bytes
from atoll_bench.calls.in_flight import calls_per_s
from atoll_bench.child import obey
from atoll_bench.host import fresh_p2pd, serving

PROTOCOL = "/atoll/bench/unary"


class Unary:
    """Unary calls over one p2pd."""

    def __init__(self, host: P2pdHost) -> None:
        self._host = host
        self._pb = unary_messages()
        self._waiting: dict[bytes, asyncio.Future[bytes]] = {}
        self._number = 0
        self._peer = b""
        self._writer: asyncio.StreamWriter | None = None

    async def attach(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The persistent connection; `run` reads it."""
        reader, self._writer = await asyncio.open_unix_connection(self._host.control_socket, limit=BUFFER_BYTES)
        request = messages().Request(type=messages().Request.PERSISTENT_CONN_UPGRADE).SerializeToString()
        self._writer.write(varint(len(request)) + request)
        await read_message(reader, messages().Response)
        return reader, self._writer

    async def answer(self) -> None:
        """Answer peers from now on."""
        await self._ask(addUnaryHandler=self._pb.AddUnaryHandlerRequest(proto=PROTOCOL, balanced=False))

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Read what p2pd sends until it ends."""
        buffer = bytearray()
        while data := await reader.read(BUFFER_BYTES):
            buffer += data
            for raw in take_messages(buffer):
                self._take(self._pb.PersistentConnectionResponse.FromString(raw))

    def _take(self, message: Any) -> None:
        if message.HasField("requestHandling"):
            answer = self._pb.CallUnaryResponse(response=message.requestHandling.data)
            self._send(self._pb.PersistentConnectionRequest(callId=message.callId, unaryResponse=answer))
            return
        future = self._waiting.pop(message.callId, None)
        if future is None or future.done():
            return
        if message.HasField("daemonError"):
            future.set_exception(LocalFault(f"p2pd: {message.daemonError.message}"))
        else:
            future.set_result(message.callUnaryResponse.response)

    def _send(self, message: Any) -> None:
        assert self._writer is not None
        body = message.SerializeToString()
        self._writer.write(varint(len(body)) + body)

    async def _ask(self, **what: Any) -> bytes:
        self._number += 1
        call = self._number.to_bytes(16, "big")
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[call] = future
        self._send(self._pb.PersistentConnectionRequest(callId=call, **what))
        return await future

    async def address(self) -> tuple[str, tuple[str, ...]]:
        """PeerID and where it listens."""
        return self._host.peer_id, await self._host.addresses()

    async def connect(self, peer: str, maddrs: list[str]) -> None:
        """Whom `echo` asks."""
        await self._host.connect(PeerAddress(PeerId(peer), tuple(maddrs)))
        self._peer = peer_bytes(PeerId(peer))

    async def echo(self, size: int, in_flight: int, seconds: float) -> float:
        """Calls per second."""
        data = bytes(size)

        async def call() -> None:
            request = self._pb.CallUnaryRequest(peer=self._peer, proto=PROTOCOL, data=data)
            if len(await self._ask(callUnary=request)) != size:
                raise LocalFault("the echo is not what was sent")

        return await calls_per_s(call, in_flight, seconds)


def unary_messages() -> Any:
    """The messages of the persistent control connection."""
    known = messages().Request.DESCRIPTOR.file.message_types_by_name
    names = (
        "PersistentConnectionRequest",
        "PersistentConnectionResponse",
        "AddUnaryHandlerRequest",
        "CallUnaryRequest",
        "CallUnaryResponse",
    )
    return SimpleNamespace(**{name: message_factory.GetMessageClass(known[name]) for name in names})


def take_messages(buffer: bytearray) -> Iterator[bytes]:
    """Every whole length-prefixed message at the begin of `buffer`; they are taken out of it."""
    at = 0
    while True:
        size = shift = 0
        begin = at
        while begin < len(buffer):
            byte = buffer[begin]
            begin += 1
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        else:
            break
        if begin + size > len(buffer):
            break
        yield bytes(memoryview(buffer)[begin : begin + size])
        at = begin + size
    del buffer[:at]


async def main() -> None:
    """Until standard input ends."""
    host = fresh_p2pd()
    unary = Unary(host)
    orders: dict[str, Any] = {"address": unary.address, "connect": unary.connect, "echo": unary.echo}
    async with serving(host) as group:
        reader, writer = await unary.attach()
        reading = group.create_task(unary.run(reader))
        await unary.answer()
        await obey(orders)
        reading.cancel()
        writer.transport.abort()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
