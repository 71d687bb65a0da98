"""Thin client of p2pd's control socket: one short Unix connection per request, one per stream.

Multiaddrs are encoded by the `multiaddr` package: hivemind's own encoding of `/p2p/…` is refused by
go-multiaddr, so that circuit addresses could not be dialled. Every failure becomes Unreachable.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any

from multiaddr import Multiaddr

from atoll.p2p.transports.p2pd.schema import messages
from atoll.p2p.transports.p2pd.unix_socket import UnixSocket
from atoll.protocols.errors import DecodeError, Unreachable
from atoll.protocols.ids import PeerId, peer_bytes, peer_from_bytes

ANSWER_S = 15.0
"""Seconds that p2pd, a process of this machine, has for an answer, beside those that it waits for a peer."""
_REPLY_MAX_BYTES = 8 * 1024 * 1024
_P2PD_DEADLINE_S = 30
"""p2pd stops opening a stream after this time, also when the caller has stopped waiting."""
_DIAL_LAG_S = 0.25
"""p2pd ends a dial so much later than our clock says, at most: a dial that begins earlier would join it."""
_ERROR_CHARACTERS = 4000
_TAG_PEER = 0  # of ConnManagerRequest.Type
_UNIX_CODE = b"\x90\x03"  # multicodec 400 as a varint


class P2pdControl:
    """Requests to the p2pd whose control socket is `path`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._pb: Any = messages()
        self._dial_ends: dict[PeerId, float] = {}
        """When p2pd ends its dial to a peer at the latest, on the loop's clock."""
        self._lost_at: float | None = None
        """When the first request after the newest answer was given up, on the loop's clock."""

    @property
    def silence(self) -> str:
        """What to say of a p2pd that is there and answers nothing: it hangs, or is stopped. Else empty."""
        is_mute = self._lost_at is not None and asyncio.get_running_loop().time() - self._lost_at > ANSWER_S
        return "answers nothing any more" if is_mute else ""

    async def identify(self) -> tuple[PeerId, tuple[str, ...]]:
        """Return p2pd's PeerID, and its listen and observed multiaddrs."""
        response = await self._request(self._pb.Request(type=self._pb.Request.IDENTIFY))
        try:
            return peer_from_bytes(response.identify.id), texts_of(response.identify.addrs)
        except DecodeError as error:
            raise Unreachable(f"p2pd has another kind of identity: {error}") from error

    async def connect(self, peer: PeerId, maddrs: Iterable[str], within_s: float) -> None:
        """Dial a peer; returns when a connection exists. p2pd counts its deadline in whole seconds."""
        try:
            raw = [Multiaddr(text).to_bytes() for text in maddrs]
        except Exception as error:  # multiaddr raises a dozen kinds
            raise Unreachable(f"not a multiaddr we can dial: {error}") from error
        timeout_s = await self._dial_timeout_s(peer, math.ceil(within_s))
        body = self._pb.ConnectRequest(peer=peer_bytes(peer), addrs=raw, timeout=timeout_s)
        await self._request(self._pb.Request(type=self._pb.Request.CONNECT, connect=body))
        self._dial_ends.pop(peer, None)

    async def _dial_timeout_s(self, peer: PeerId, wanted_s: int) -> int:
        """Seconds for a new dial, no longer than the one that hangs: p2pd joins both, and ends them together.

        Dials that join one after the other would hang until p2pd counts a failure, and refuses further ones.
        """
        now = asyncio.get_running_loop().time
        left_s = self._dial_ends.get(peer, 0.0) - now()
        while 0.0 < left_s < 1.0 + _DIAL_LAG_S:
            await asyncio.sleep(left_s)
            left_s = self._dial_ends.get(peer, 0.0) - now()
        if left_s > 0.0:
            return min(wanted_s, int(left_s - _DIAL_LAG_S))
        self._dial_ends = {other: end for other, end in self._dial_ends.items() if end > now()}
        self._dial_ends[peer] = now() + wanted_s + _DIAL_LAG_S
        return wanted_s

    async def disconnect(self, peer: PeerId) -> None:
        """Close all connections to a peer."""
        body = self._pb.DisconnectRequest(peer=peer_bytes(peer))
        await self._request(self._pb.Request(type=self._pb.Request.DISCONNECT, disconnect=body))

    async def favour(self, peer: PeerId) -> None:
        """Let p2pd close connections of other peers first. It forgets that with the connection."""
        request = self._pb.Request(type=self._pb.Request.CONNMANAGER)
        request.connManager.type = _TAG_PEER
        request.connManager.peer = peer_bytes(peer)
        request.connManager.tag, request.connManager.weight = "member", 1
        await self._request(request)

    async def list_peers(self) -> tuple[tuple[PeerId, str], ...]:
        """Return (peer, remote multiaddr) of every live connection with an Ed25519 peer."""
        response = await self._request(self._pb.Request(type=self._pb.Request.LIST_PEERS))
        found = []
        for info in response.peers:
            try:
                found.append((peer_from_bytes(info.id), next(iter(texts_of(info.addrs)), "")))
            except DecodeError:
                continue  # an RSA peer is no member of ours; p2pd may still be connected to it
        return tuple(found)

    async def register(self, protocol: str, socket_path: str) -> None:
        """Let p2pd connect to our Unix socket for each inbound stream of `protocol`."""
        body = self._pb.StreamHandlerRequest(addr=_unix_maddr(socket_path), proto=[protocol], balanced=False)
        await self._request(self._pb.Request(type=self._pb.Request.STREAM_HANDLER, streamHandler=body))

    async def open_stream(self, peer: PeerId, protocol: str) -> UnixSocket:
        """Open a stream; the socket carries its bytes from now on."""
        body = self._pb.StreamOpenRequest(peer=peer_bytes(peer), proto=[protocol], timeout=_P2PD_DEADLINE_S)
        return await self._upgrade(self._pb.Request(type=self._pb.Request.STREAM_OPEN, streamOpen=body))

    async def attach(self) -> UnixSocket:
        """Open a persistent connection: p2pd exits when the last of them closes, so it dies with us."""
        return await self._upgrade(self._pb.Request(type=self._pb.Request.PERSISTENT_CONN_UPGRADE))

    async def _request(self, request: Any) -> Any:
        async with self._socket() as socket:
            response = await self._exchange(request, socket)
            socket.abort()
            return response

    async def _upgrade(self, request: Any) -> UnixSocket:
        """Make a request after which the connection carries other bytes."""
        async with self._socket() as socket:
            await self._exchange(request, socket)
            return socket

    @asynccontextmanager
    async def _socket(self) -> AsyncIterator[UnixSocket]:
        """Connect to p2pd; the connection is aborted when the block is left by an error or a cancellation."""
        try:
            socket = await UnixSocket.connect(self._path)
        except OSError as error:
            if isinstance(error, FileNotFoundError):  # somebody empties /tmp: nothing else would end this p2pd
                self._lost_at = self._lost_at or asyncio.get_running_loop().time()
            raise Unreachable(f"p2pd does not answer: {error}") from error
        try:
            yield socket
        except (OSError, asyncio.IncompleteReadError) as error:
            socket.abort()
            raise Unreachable("p2pd closed its control socket") from error
        except BaseException:
            socket.abort()
            raise

    async def _exchange(self, request: Any, socket: UnixSocket) -> Any:
        body = request.SerializeToString()
        within_s = ANSWER_S + request.connect.timeout + request.streamOpen.timeout  # of others they are 0
        try:
            async with asyncio.timeout(within_s):
                await socket.write(varint(len(body)) + body)
                response = await read_message(socket, self._pb.Response)
        except TimeoutError as error:
            self._lost_at = self._lost_at or asyncio.get_running_loop().time()
            raise Unreachable(f"p2pd did not answer within {within_s:.0f} s") from error
        self._lost_at = None
        if response.type == self._pb.Response.ERROR:
            raise Unreachable(" ".join(response.error.msg.split())[:_ERROR_CHARACTERS])
        return response


async def read_message(reader: UnixSocket | asyncio.StreamReader, kind: Any) -> Any:
    """Read one length-prefixed protobuf message from p2pd. Raises Unreachable for a length that it cannot have."""
    size = shift = 0
    while True:
        byte = (await reader.readexactly(1))[0]
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
        if shift > 28:
            raise Unreachable("p2pd sent a length that is too long")
    if size > _REPLY_MAX_BYTES:
        raise Unreachable(f"p2pd announced a message of {size} bytes")
    return kind.FromString(await reader.readexactly(size))


def texts_of(raw_maddrs: Iterable[bytes]) -> tuple[str, ...]:
    """Multiaddrs as text; kinds that the `multiaddr` package does not know are left out."""
    return tuple(filter(None, map(_text_of, raw_maddrs)))


@lru_cache(maxsize=4096)
def _text_of(raw_maddr: bytes) -> str:
    try:
        return str(Multiaddr(raw_maddr))
    except Exception:  # multiaddr raises a dozen kinds; such an address is no use to us
        return ""


def _unix_maddr(path: str) -> bytes:
    raw = path.encode()
    return _UNIX_CODE + varint(len(raw)) + raw


def varint(value: int) -> bytes:
    """Encode `value` as protobuf's length prefix."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
