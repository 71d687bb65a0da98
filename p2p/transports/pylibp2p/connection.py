"""One connection to one peer: its handshake, its multiplexer, and the protocols of its streams. All in trio.

go-libp2p asks `/ipfs/id/1.0.0` on every new connection. With the answer it opens streams without asking for the
protocol first, and learns its own observed address.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as new_noise_keys
from libp2p.custom_types import TProtocol
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.io.exceptions import IOException
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.protocol_muxer.multiselect import MULTISELECT_PROTOCOL_ID, Multiselect
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as Noise
from libp2p.stream_muxer.yamux.yamux import GO_AWAY_NORMAL, TYPE_GO_AWAY
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
from libp2p.transport.upgrader import TransportUpgrader
from libp2p.utils import encode_delim, encode_varint_prefixed
from multiaddr import Multiaddr

from atoll.p2p.transports.pylibp2p.tcp_connection import TcpConnection, remote_maddr
from atoll.p2p.transports.pylibp2p.yamux import FRAME, Lane, Muxer
from atoll.protocols.errors import Unreachable
from atoll.protocols.ids import PeerId, peer_bytes, peer_from_bytes

log = logging.getLogger(__name__)
HANDSHAKE_S: Final = 10.0
"""From the first byte to an authenticated, multiplexed connection; also the name of a stream's protocol."""
_NEGOTIATING: Final = 64
"""Streams of one peer whose protocol is not agreed yet."""
_GO_AWAY_S: Final = 0.5
OnStream = Callable[["PeerConnection", str, Lane], Awaitable[None]]
IDENTIFY: Final = "/ipfs/id/1.0.0"
_ANSWER_S: Final = 10.0


class Upgrader:
    """Turns a TCP connection into a PeerConnection: Noise and yamux, nothing else is offered or accepted."""

    def __init__(self, seed: bytes, keepalive_s: float) -> None:
        """py-libp2p's defaults would also offer plaintext and secio."""
        keys = create_new_key_pair(seed)
        noise = Noise(keys, noise_privkey=new_noise_keys().private_key)
        self._keepalive_s = keepalive_s
        self._upgrader = TransportUpgrader({NOISE: noise}, {TProtocol(YAMUX): Muxer}, ceil(HANDSHAKE_S))
        self.peer_id = peer_from_bytes(ID.from_pubkey(keys.public_key).to_bytes())
        self.public_key = keys.public_key.serialize()

    async def link(self, stream: trio.SocketStream, expected: PeerId | None) -> "PeerConnection":
        """Authenticate; `expected` when we dialled. Raises Unreachable; the socket is closed then."""
        wire = TcpConnection(stream)
        try:
            maddr = remote_maddr(stream)
            with trio.fail_after(HANDSHAKE_S):
                return await self._shake_hands(wire, maddr, expected)
        except Exception as error:  # py-libp2p and what it uses raise dozens of kinds on what a peer sends
            wire.abort()
            raise Unreachable(f"no handshake: {_reason(error)}") from error
        except BaseException:
            wire.abort()
            raise

    async def _shake_hands(self, wire: TcpConnection, maddr: str, expected: PeerId | None) -> "PeerConnection":
        raw = RawConnection(wire, expected is not None)
        wanted = None if expected is None else ID(peer_bytes(expected))
        secured = await self._upgrader.upgrade_security(raw, expected is not None, wanted)
        peer = peer_from_bytes(secured.get_remote_peer().to_bytes())
        # Not `upgrade_connection`: it makes a plain Yamux whatever the options say.
        kind = await self._upgrader.muxer_multistream.select_transport(secured)
        muxer = kind(secured, secured.get_remote_peer())
        assert isinstance(muxer, Muxer)
        muxer.keepalive_s = self._keepalive_s
        wire.established()
        return PeerConnection(peer, maddr, wire, muxer)


class PeerConnection:
    """A live connection to one peer. `run` owns all its tasks."""

    def __init__(self, peer: PeerId, maddr: str, wire: TcpConnection, muxer: Muxer) -> None:
        self.peer = peer
        self.maddr = maddr
        self._wire = wire
        self._muxer = muxer
        self._scope = trio.CancelScope()
        self._negotiating = 0
        self.nursery: trio.Nursery | None = None

    async def run(self, protocols: Multiselect, on_stream: OnStream) -> None:
        """Serve the connection until it ends. `on_stream` is awaited in a task of its own."""
        try:
            with self._scope:
                async with trio.open_nursery() as self.nursery:
                    self.nursery.start_soon(self._multiplex)
                    while True:
                        lane = await self._muxer.accept_lane()
                        self._negotiating += 1
                        self.nursery.start_soon(self._inbound, lane, protocols, on_stream)
        except* Exception as error:  # a broken connection shows in a dozen ways, also while we are cancelled
            log.debug("connection to %s ended: %s", self.peer, _reason(error))
        finally:
            self.nursery = None
            self._muxer.event_shutting_down.set()
            self._wire.abort()

    async def open(self, protocol: str) -> Lane:
        """Open a stream of `protocol`. Raises Unreachable."""
        try:
            lane = await self._muxer.open_lane()
            try:
                with trio.fail_after(HANDSHAKE_S):
                    await _propose(lane, protocol)
            except BaseException:
                with trio.CancelScope(shield=True):
                    await lane.drop()
                raise
        except Unreachable:
            raise
        except Exception as error:
            raise Unreachable(f"no stream of {protocol}: {_reason(error)}") from error
        return lane

    async def close(self) -> None:
        """Send a go-away frame if that is possible soon, and end."""
        self._wire.stall_s = _GO_AWAY_S
        with trio.move_on_after(_GO_AWAY_S):
            await self._muxer.send_frame(FRAME.pack(0, TYPE_GO_AWAY, 0, 0, GO_AWAY_NORMAL))
        self.cut()

    def cut(self) -> None:
        """End the connection now."""
        self._wire.abort()
        self._scope.cancel()

    async def _multiplex(self) -> None:
        await self._muxer.start()
        self._scope.cancel()

    async def _inbound(self, lane: Lane, protocols: Multiselect, on_stream: OnStream) -> None:
        """Let the peer name a protocol that we serve, then hand the stream over."""
        try:
            if self._negotiating > _NEGOTIATING:
                return await lane.drop()
            talk = MultiselectCommunicator(lane)  # type: ignore[arg-type]  # it reads and writes, nothing else
            name, _ = await protocols.negotiate(talk, ceil(HANDSHAKE_S))
        except Exception as error:
            log.debug("stream of %s names no protocol: %s", self.peer, _reason(error))
            return await lane.drop()
        finally:
            self._negotiating -= 1
        await on_stream(self, str(name), lane)


async def _propose(lane: Lane, protocol: str) -> None:
    """Agree on `protocol` by multistream-select in one round trip; py-libp2p's client needs two."""
    await lane.write(encode_delim(MULTISELECT_PROTOCOL_ID.encode()) + encode_delim(protocol.encode()))
    talk = MultiselectCommunicator(lane)  # type: ignore[arg-type]
    for expected in (MULTISELECT_PROTOCOL_ID, protocol):
        if (answer := await talk.read()) != expected:
            raise Unreachable(f"the peer does not serve {protocol} ({answer[:40]!r})")


def _reason(error: BaseException) -> str:
    """Return the innermost reason on one line."""
    while isinstance(error, BaseExceptionGroup) or error.__cause__ is not None:
        inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__
        assert inner is not None
        error = inner
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


@dataclass(frozen=True, slots=True)
class Introduction:
    """The facts about us that a peer may know, and where we see it."""

    public_key: bytes
    maddrs: Sequence[str]
    observed: str
    protocols: Sequence[str]


async def introduce(lane: Lane, about: Introduction) -> None:
    """Send `about` and end the stream."""
    message = Identify(
        protocol_version="ipfs/0.1.0",
        agent_version="atoll",
        public_key=about.public_key,
        listen_addrs=[Multiaddr(maddr).to_bytes() for maddr in about.maddrs],
        observed_addr=Multiaddr(about.observed).to_bytes(),
        protocols=list(about.protocols),
    )
    try:
        with trio.move_on_after(_ANSWER_S):
            await lane.write(encode_varint_prefixed(message.SerializeToString()))
            await lane.finish()
            await lane.receive()
    except IOException:
        return
    finally:
        await lane.drop()
