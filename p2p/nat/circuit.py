"""The two ends of a circuit: open one through a relay, take one that a relay brings.

Inside the TLS the first frame names the protocol of the stream; the answer is Open or Refused.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from atoll.p2p.host.framing import read_frame, write_frame
from atoll.p2p.host.interface import Handler, Host, Stream
from atoll.p2p.nat.circuit_stream import SecureStream, handshake
from atoll.p2p.nat.circuit_tls import Credentials
from atoll.p2p.nat.relay import CIRCUIT_PROTOCOL, OPEN_S, RELAY_PROTOCOL
from atoll.p2p.transports.inbound_stream import Admission, OnFault, run_handler
from atoll.protocols import codec
from atoll.protocols.errors import DecodeError, PeerFault, Unreachable
from atoll.protocols.ids import PeerId, RunId, short
from atoll.protocols.nat import (
    NAT_MAX_BYTES,
    Circuit,
    Incoming,
    NatRefused,
    OpenCircuit,
    decode_opening,
    printable,
    refused,
)

PROTOCOL_MAX_BYTES = 128
T = TypeVar("T")


async def open_circuit(
    host: Host, run: RunId, credentials: Credentials, relay: PeerId, target: PeerId, protocol: str
) -> SecureStream:
    """A stream to `target` through `relay`. Raises Unreachable with what the relay or the target said."""
    stream = await host.open_stream(relay, RELAY_PROTOCOL)
    try:
        await write_frame(stream, codec.encode(Circuit(run, target)))
        await _expect_open(stream, f"relay {short(relay)}")
        inside = await handshake(stream, credentials, protocol, client=True)
        if inside.peer != target:
            raise Unreachable(f"relay {short(relay)} brought {short(inside.peer)}, not {short(target)}")
        await write_frame(inside, protocol.encode("ascii"))
        await _expect_open(inside, short(target))
        return inside
    except BaseException:
        stream.reset()
        raise


async def _expect_open(stream: Stream, who: str) -> None:
    try:
        answer = decode_opening(await read_frame(stream, NAT_MAX_BYTES))
    except DecodeError as error:
        raise Unreachable(f"{who}: {error}") from error
    if isinstance(answer, NatRefused):
        raise Unreachable(f"{who}: {printable(answer.reason)}")


class CircuitEnd:
    """Takes circuits that relays bring, and serves the streams in them like any other.

    A stream comes after a hold, as on any transport a stream comes after a connection: whoever looks at
    connections (and hangs up on peers that it keeps away) sees everybody who is served.
    """

    def __init__(
        self,
        host: Host,
        run: RunId,
        credentials: Credentials,
        handlers: Mapping[str, Handler],
        is_welcome: Callable[[PeerId, str], bool],
        on_fault: OnFault,
    ) -> None:
        """`handlers`: protocol -> handler; read at each circuit. `is_welcome(source, protocol)`: serve it?"""
        self._run, self._credentials, self._handlers, self._on_fault = run, credentials, handlers, on_fault
        self._is_welcome = is_welcome
        self._admission = Admission()
        self._served: set[SecureStream] = set()
        host.set_handler(CIRCUIT_PROTOCOL, self._handle)

    def end(self, peer: PeerId) -> None:
        """Reset all streams that `peer` opened to us in circuits."""
        for stream in tuple(self._served):
            if stream.peer == peer:
                stream.reset()

    async def _handle(self, stream: Stream) -> None:
        inside = await self._in_time(stream, self._welcome(stream))
        if inside is None:
            return
        if not self._admission.enter(inside.peer):
            await self._in_time(stream, write_frame(inside, codec.encode(refused("too many streams"))))
            return
        self._served.add(inside)
        try:
            await self._in_time(stream, write_frame(inside, codec.encode(OpenCircuit())))
            await run_handler(inside, self._handlers[inside.protocol], self._on_fault)
        finally:
            self._served.discard(inside)
            self._admission.leave(inside.peer)

    async def _in_time(self, stream: Stream, step: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(OPEN_S):
                return await step
        except (PeerFault, TimeoutError) as error:
            # Relay and source share the blame for what comes here: nobody gets it.
            raise Unreachable(f"circuit through {short(stream.peer)}: {error}") from error

    async def _welcome(self, stream: Stream) -> SecureStream | None:
        incoming = codec.decode(await read_frame(stream, NAT_MAX_BYTES), Incoming, max_bytes=NAT_MAX_BYTES)
        if incoming.run != self._run:
            await write_frame(stream, codec.encode(refused("another run")))
            return None
        await write_frame(stream, codec.encode(OpenCircuit()))
        inside = await handshake(stream, self._credentials, "", client=False)
        protocol = (await read_frame(inside, PROTOCOL_MAX_BYTES)).decode("ascii", "replace")
        if protocol not in self._handlers or not self._is_welcome(inside.peer, protocol):
            await write_frame(inside, codec.encode(refused("that protocol is not served, or nothing is held")))
            return None
        inside.speaks(protocol)
        return inside
