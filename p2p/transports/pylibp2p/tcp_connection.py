"""One TCP connection as py-libp2p reads and writes it, with the limits that py-libp2p lacks.

- Reads return all that was asked for: py-libp2p gives up after 100 partial reads.
- A frame that is cut by a cancellation would break the whole encrypted connection: writes are shielded,
  and a peer that takes nothing for `stall_s` is gone.
- Before the handshake is over, a peer is worth a few kilobytes.
"""

import socket
from typing import Final

import trio
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError

_READ_BYTES: Final = 256 * 1024
_MESSAGE_MAX_BYTES: Final = 65535
"""A Noise message; nothing larger is ever read at once."""
_HANDSHAKE_BYTES: Final = 64 * 1024
_STALL_S: Final = 20.0


class TcpConnection(ReadWriteCloser):
    """See `libp2p.io.abc.ReadWriteCloser`."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._buffer = bytearray()
        self._budget: int | None = _HANDSHAKE_BYTES
        self.stall_s = _STALL_S

    def established(self) -> None:
        """Lift the byte budget: the peer is authenticated, and its multiplexer bounds what it sends."""
        self._budget = None

    async def read(self, n: int | None = None) -> bytes:
        """Read `n` bytes. Raises ConnectionClosedError when they do not come or are too many."""
        wanted = n or 0
        if wanted > _MESSAGE_MAX_BYTES:
            raise self._gone(f"a message of {wanted} bytes")
        while len(self._buffer) < wanted:
            self._buffer += await self._receive()
        data = bytes(self._buffer[:wanted])
        del self._buffer[:wanted]
        return data

    async def write(self, data: bytes) -> None:
        """Send all of `data`; no cancellation cuts it. Raises ConnectionClosedError."""
        with trio.CancelScope(deadline=trio.current_time() + self.stall_s, shield=True) as sending:
            try:
                await self._stream.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise self._gone("closed") from error
        if sending.cancelled_caught:
            raise self._gone(f"the peer takes nothing for {self.stall_s:.1f} s")

    async def close(self) -> None:
        """Close the socket; tasks that read or write are woken."""
        self.abort()
        await trio.lowlevel.checkpoint()

    def abort(self) -> None:
        """Close the socket now. Idempotent."""
        self._stream.socket.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        """Part of py-libp2p's interface, needed in places that we do not use."""
        return None

    async def _receive(self) -> bytes:
        try:
            data = await self._stream.receive_some(_READ_BYTES)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise self._gone("closed") from error
        if not data:
            raise self._gone("ended by the peer")
        if self._budget is not None:
            self._budget -= len(data)
            if self._budget < 0:
                raise self._gone("too much before the handshake")
        return bytes(data)

    def _gone(self, why: str) -> ConnectionClosedError:
        self.abort()
        return ConnectionClosedError(why, transport="tcp")


def remote_maddr(stream: trio.SocketStream) -> str:
    """Return the multiaddr of the other end. Raises OSError when it left already."""
    host, port = stream.socket.getpeername()[:2]
    return tcp_maddr(host, port)


def tcp_maddr(host: str, port: int) -> str:
    """Return the multiaddr of a TCP endpoint; IPv4 inside IPv6 becomes IPv4, a zone is dropped."""
    plain = host.partition("%")[0].removeprefix("::ffff:")
    return f"/ip6/{plain}/tcp/{port}" if ":" in plain else f"/ip4/{plain}/tcp/{port}"


async def listen_on(maddr: str) -> trio.SocketListener:
    """Return a listener on `/ip4|ip6/HOST/tcp/PORT`. Raises OSError.

    py-libp2p's own listener sets SO_REUSEPORT, so that a second node would steal our connections.
    """
    _, kind, host, _, port = maddr.split("/")
    listener = trio.socket.socket(socket.AF_INET6 if kind == "ip6" else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if kind == "ip6":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        await listener.bind((host, int(port)))
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return trio.SocketListener(listener)
