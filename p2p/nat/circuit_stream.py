"""A stream whose other end is behind a relay: TLS inside the frames that the relay passes on."""

from atoll.p2p.host.framing import read_frame, write_frame
from atoll.p2p.host.interface import Stream
from atoll.p2p.nat.circuit_tls import RECORDS_BYTES, SEALED_MAX_BYTES, Credentials, Tls
from atoll.protocols.errors import DecodeError, SignatureFault, Unreachable
from atoll.protocols.ids import PeerId


class SecureStream:
    """See `atoll.p2p.host.interface.Stream`. Made by `handshake`."""

    def __init__(self, inner: Stream, tls: Tls, peer: PeerId, protocol: str, carried: bytes = b"") -> None:
        self._inner, self._tls = inner, tls
        self._peer, self._protocol = peer, protocol
        self._plain = bytearray(carried)

    @property
    def peer(self) -> PeerId:
        """The other end, proved by its certificate; not the relay."""
        return self._peer

    @property
    def protocol(self) -> str:
        """Protocol of the stream inside the circuit."""
        return self._protocol

    @property
    def relay(self) -> PeerId:
        """Who passes the frames on."""
        return self._inner.peer

    def speaks(self, protocol: str) -> None:
        """The initiator has named the protocol."""
        self._protocol = protocol

    async def read_exactly(self, size: int) -> bytes:
        """`size` bytes. Raises Unreachable when the stream ends before."""
        while len(self._plain) < size:
            self._tls.feed(await _frame(self._inner))
            self._plain += self._tls.plain()
        data = bytes(memoryview(self._plain)[:size])
        del self._plain[:size]
        return data

    async def write(self, data: bytes | memoryview) -> None:
        """Hand over all of `data`, waiting for room. Raises Unreachable."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), RECORDS_BYTES):
            await write_frame(self._inner, self._tls.seal(view[start : start + RECORDS_BYTES]))

    async def close(self) -> None:
        """End our side in good order."""
        await self._inner.close()

    def reset(self) -> None:
        """Drop the stream now."""
        self._inner.reset()


async def handshake(inner: Stream, credentials: Credentials, protocol: str, *, client: bool) -> SecureStream:
    """Both ends prove who they are. Raises Unreachable, also for a peer that proves nothing: the relay between us
    may have changed the bytes, so that nobody can be blamed."""
    tls = credentials.connection(client=client)
    done = False
    try:
        while not done:
            done = tls.shake()
            if flight := tls.outgoing():
                await write_frame(inner, flight)
            if not done:
                tls.feed(await _frame(inner))
        return SecureStream(inner, tls, tls.peer(), protocol, tls.plain())
    except SignatureFault as error:
        raise Unreachable(f"the other end of the circuit: {error}") from error


async def _frame(inner: Stream) -> bytes:
    try:
        return await read_frame(inner, SEALED_MAX_BYTES)
    except DecodeError as error:
        raise Unreachable(f"the relay sent nonsense: {error}") from error
