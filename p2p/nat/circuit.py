"""The two ends of a circuit: open one through a relay, take one that a relay brings.

Inside the TLS the first frame names the protocol of the stream; the answer is Open or Refused.
"""

import asyncio

from atoll.p2p.framing import read_frame, write_frame
from atoll.p2p.host import Handler, Host, Stream
from atoll.p2p.nat.relay import CIRCUIT_PROTOCOL, OPEN_S, RELAY_PROTOCOL
from atoll.p2p.nat.secure import SecureStream, handshake
from atoll.p2p.nat.tls import Credentials
from atoll.p2p.transports.handling import Admission, OnFault, run_handler
from atoll.protocols import codec
from atoll.protocols.errors import DecodeError, PeerFault, Unreachable
from atoll.protocols.ids import PeerId, RunId, short
from atoll.protocols.nat import NAT_MAX_BYTES, Circuit, Incoming, Open, Refused, decode_opening, refused

PROTOCOL_MAX_BYTES = 128


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
    if isinstance(answer, Refused):
        raise Unreachable(f"{who}: {answer.reason}")


class CircuitEnd:
    """Takes circuits that relays bring, and serves the streams in them like any other."""

    def __init__(
        self, host: Host, run: RunId, credentials: Credentials, handlers: dict[str, Handler], on_fault: OnFault
    ) -> None:
        """`handlers`: protocol -> handler; read at each circuit."""
        self._run, self._credentials, self._handlers, self._on_fault = run, credentials, handlers, on_fault
        self._admission = Admission()
        host.set_handler(CIRCUIT_PROTOCOL, self._handle)

    async def _handle(self, stream: Stream) -> None:
        try:
            async with asyncio.timeout(OPEN_S):
                inside = await self._welcome(stream)
        except (PeerFault, TimeoutError) as error:
            # Relay and source share the blame for what comes here: nobody gets it.
            raise Unreachable(f"circuit through {short(stream.peer)}: {error}") from error
        if inside is None:
            return
        try:
            await run_handler(inside, self._handlers[inside.protocol], self._on_fault)
        finally:
            self._admission.leave(inside.peer)

    async def _welcome(self, stream: Stream) -> SecureStream | None:
        incoming = codec.decode(await read_frame(stream, NAT_MAX_BYTES), Incoming, max_bytes=NAT_MAX_BYTES)
        if incoming.run != self._run:
            await write_frame(stream, codec.encode(refused("another run")))
            return None
        await write_frame(stream, codec.encode(Open()))
        inside = await handshake(stream, self._credentials, "", client=False)
        protocol = (await read_frame(inside, PROTOCOL_MAX_BYTES)).decode("ascii", "replace")
        if protocol not in self._handlers or not self._admission.enter(inside.peer):
            await write_frame(inside, codec.encode(refused("that protocol is not served, or too many streams")))
            return None
        await write_frame(inside, codec.encode(Open()))
        inside.speaks(protocol)
        return inside
