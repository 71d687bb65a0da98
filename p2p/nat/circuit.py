"""The two ends of a circuit: open one through a relay, accept one that a relay brings, and its encrypted stream.

Inside the TLS the first frame names the protocol of the stream; the answer is Open or Refused.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from atoll.p2p.host.framing import read_frame, write_frame
from atoll.p2p.host.interface import Handler, Host, Stream
from atoll.p2p.limits.limited_host import carries
from atoll.p2p.nat.relay import CIRCUIT_PROTOCOL, OPEN_S, RELAY_PROTOCOL
from atoll.p2p.transports.host_base import Admission, OnFault, run_handler
from atoll.protocols import codec
from atoll.protocols.errors import DecodeError, PeerFault, SignatureFault, Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId, RunId, short
from atoll.protocols.nat import (
    NAT_MAX_BYTES,
    RECORDS_BYTES,
    SEALED_MAX_BYTES,
    Circuit,
    Incoming,
    NatRefused,
    OpenCircuit,
    decode_opening,
    printable,
    refused,
)

if TYPE_CHECKING:
    from atoll.p2p.nat.circuit_tls import Credentials, Tls

Prover: TypeAlias = "Callable[[], Credentials]"
"""Gives this process's certificate, which the first circuit makes."""
PROTOCOL_MAX_BYTES = 128
T = TypeVar("T")


def prover(identity: Identity) -> Prover:
    """Give one certificate for every circuit of this process; the first one imports what makes it."""
    return cache(partial(_credentials, identity))


def _credentials(identity: Identity) -> "Credentials":
    from atoll.p2p.nat.circuit_tls import Credentials

    return Credentials(identity)


class SecureStream:
    """A stream to a peer behind a relay: TLS inside the frames that the relay passes on. Made by `handshake`."""

    def __init__(self, inner: Stream, tls: "Tls", peer: PeerId, protocol: str, received: bytes = b"") -> None:
        self.peer = peer
        """The other end, proved by its certificate; not the relay."""
        self.protocol = protocol
        """Protocol of the stream inside the circuit; the accepting end sets it when the initiator named it."""
        self.relay = inner.peer
        """The peer that passes the frames on."""
        self.close = inner.close
        self.reset = inner.reset
        self._inner = inner
        self._tls = tls
        self._plaintext = bytearray(received)

    async def read_exactly(self, size: int) -> bytes:
        """Read `size` bytes. Raises Unreachable when the stream ends before."""
        while len(self._plaintext) < size:
            self._tls.feed(await _read_sealed(self._inner))
            self._plaintext += self._tls.plaintext()
        data = bytes(memoryview(self._plaintext)[:size])
        del self._plaintext[:size]
        return data

    async def write(self, data: bytes | memoryview) -> None:
        """Hand over all of `data`, waiting for room. Raises Unreachable."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), RECORDS_BYTES):
            await write_frame(self._inner, self._tls.seal(view[start : start + RECORDS_BYTES]))


async def handshake(inner: Stream, credentials: Prover, protocol: str, *, client: bool) -> SecureStream:
    """Let both ends prove their PeerIDs. Raises Unreachable, also for an end that proves nothing."""
    tls = credentials().connection(client=client)
    done = False
    try:
        while not done:
            done = tls.handshake()
            if flight := tls.outgoing():
                await write_frame(inner, flight)
            if not done:
                tls.feed(await _read_sealed(inner))
        return SecureStream(inner, tls, tls.peer(), protocol, tls.plaintext())
    except SignatureFault as error:
        # Not passed on as a PeerFault: the relay may have changed the bytes, so nobody can be blamed for them.
        raise Unreachable(f"the other end of the circuit: {error}") from error


async def _read_sealed(inner: Stream) -> bytes:
    try:
        return await read_frame(inner, SEALED_MAX_BYTES)
    except DecodeError as error:
        raise Unreachable(f"the relay sent nonsense: {error}") from error


async def open_circuit(
    host: Host, run: RunId, credentials: Prover, relay: PeerId, target: PeerId, protocol: str
) -> SecureStream:
    """Open a stream to `target` through `relay`. Raises Unreachable with the refusal of either."""
    stream = await host.open_stream(relay, RELAY_PROTOCOL)
    try:
        carries(stream, protocol)
        await write_frame(stream, codec.encode(Circuit(run, target)))
        await _expect_open(stream, f"relay {short(relay)}")
        inside = await handshake(stream, credentials, protocol, client=True)
        # TLS proves who answers, not whom the relay called: it could have brought any peer of its choice.
        if inside.peer != target:
            raise Unreachable(f"relay {short(relay)} brought {short(inside.peer)}, not {short(target)}")
        await write_frame(inside, protocol.encode("ascii"))
        await _expect_open(inside, short(target))
        return inside
    except BaseException:
        stream.reset()
        raise


async def _expect_open(stream: Stream, speaker: str) -> None:
    try:
        answer = decode_opening(await read_frame(stream, NAT_MAX_BYTES))
    except DecodeError as error:
        raise Unreachable(f"{speaker}: {error}") from error
    if isinstance(answer, NatRefused):
        raise Unreachable(f"{speaker}: {printable(answer.reason)}")


class CircuitAcceptor:
    """Accepts circuits that relays bring, and serves the streams in them like any other."""

    def __init__(
        self,
        host: Host,
        run: RunId,
        credentials: Prover,
        handlers: Mapping[str, Handler],
        is_welcome: Callable[[PeerId, str], bool],
        on_fault: OnFault,
    ) -> None:
        """`handlers`: protocol -> handler; read at each circuit. `is_welcome(source, protocol)`: serve it?"""
        self._run = run
        self._credentials = credentials
        self._handlers = handlers
        self._is_welcome = is_welcome
        self._on_fault = on_fault
        self._admission = Admission()
        self._served: set[SecureStream] = set()
        host.set_handler(CIRCUIT_PROTOCOL, self._handle)

    def end(self, peer: PeerId) -> None:
        """Reset all streams that `peer` opened to us in circuits."""
        for stream in tuple(self._served):
            if stream.peer == peer:
                stream.reset()

    async def _handle(self, stream: Stream) -> None:
        inside = await self._in_time(stream, self._accept(stream))
        if inside is None:
            return
        # The base host counted this stream as the relay's; here it counts for the peer that sent it.
        if not self._admission.enter(inside.peer, inside.protocol):
            await self._in_time(stream, write_frame(inside, codec.encode(refused("too many streams"))))
            return
        self._served.add(inside)
        try:
            await self._in_time(stream, write_frame(inside, codec.encode(OpenCircuit())))
            await run_handler(inside, self._handlers[inside.protocol], self._on_fault)
        finally:
            self._served.discard(inside)
            self._admission.leave(inside.peer, inside.protocol)

    async def _in_time(self, stream: Stream, step: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(OPEN_S):
                return await step
        except (PeerFault, TimeoutError) as error:
            # Either the relay or the source may have sent this: neither gets the blame.
            raise Unreachable(f"circuit through {short(stream.peer)}: {error}") from error

    async def _accept(self, stream: Stream) -> SecureStream | None:
        incoming = codec.decode(await read_frame(stream, NAT_MAX_BYTES), Incoming, max_bytes=NAT_MAX_BYTES)
        if incoming.run != self._run:
            await write_frame(stream, codec.encode(refused("another run")))
            return None
        await write_frame(stream, codec.encode(OpenCircuit()))
        # `incoming.source` is only the relay's word; the peer is what the certificate proves.
        inside = await handshake(stream, self._credentials, "", client=False)
        protocol = (await read_frame(inside, PROTOCOL_MAX_BYTES)).decode("ascii", "replace")
        # A stream needs a held circuit first, as on any transport a stream needs a connection: whatever looks at
        # connections, and hangs up on unwanted peers, then sees every peer that is served.
        if protocol not in self._handlers or not self._is_welcome(inside.peer, protocol):
            await write_frame(inside, codec.encode(refused("that protocol is not served, or nothing is held")))
            return None
        inside.protocol = protocol
        carries(stream, protocol)
        return inside
