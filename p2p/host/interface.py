"""The network as the rest of atoll sees it: peers, streams and events. Three transports implement it.

Rules that every transport obeys and `tests/p2p/transports/test_host_conformance.py` holds:

- The initiator of a stream closes it; the responder closes after it has seen the initiator's end. A
  transfer is over when the application acknowledged it, never when bytes were written.
- Callers own deadlines: every await here may be cancelled at any point (`asyncio.timeout`).
- A dead network raises Unreachable, nothing else. A handler that raises resets its stream; PeerFault
  raised by a handler is reported to `on_fault`.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from atoll.protocols.ids import PeerId


class Route(StrEnum):
    """How a peer is reached."""

    DIRECT = "direct"
    PUNCHED = "punched"
    RELAYED = "relayed"


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a peer may be dialled: multiaddrs without the `/p2p/…` part."""

    peer: PeerId
    maddrs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Connection:
    """One live connection to a peer."""

    peer: PeerId
    maddr: str
    path: Route


@dataclass(frozen=True, slots=True)
class PeerConnected:
    """A first connection to `peer` exists now."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class PeerDisconnected:
    """No connection to `peer` is left."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class HostRestarted:
    """The transport's own process died and is back: same PeerID, handlers registered, all streams lost."""

    restarts: int


HostEvent = PeerConnected | PeerDisconnected | HostRestarted


class Stream(Protocol):
    """A bidirectional byte stream to one peer."""

    @property
    def peer(self) -> PeerId:
        """The authenticated other side."""

    @property
    def protocol(self) -> str:
        """Protocol id that both sides agreed on."""

    async def read_exactly(self, size: int) -> bytes:
        """`size` bytes. Raises Unreachable when the stream ends before."""

    async def write(self, data: bytes | memoryview) -> None:
        """Hand over all of `data`, waiting for room. Raises Unreachable."""

    async def close(self) -> None:
        """End our side in good order. Idempotent."""

    def reset(self) -> None:
        """Drop the stream now, without waiting. Idempotent."""


Handler = Callable[[Stream], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class HostStatistics:
    """Bytes over all streams of this host since it started, and its restarts."""

    bytes_up: int
    bytes_down: int
    streams_open: int
    restarts: int


class Host(Protocol):
    """A libp2p host (or its simulation)."""

    @property
    def peer_id(self) -> PeerId:
        """Our PeerID."""

    async def serve(self, ready: "Callable[[], None]") -> None:
        """Run until cancelled; call `ready` once when streams can be opened.

        The caller owns this in a TaskGroup. Raises LocalFault when it can never start (port in use);
        later deaths of a helper process are repaired and announced as HostRestarted.
        """

    async def addresses(self) -> tuple[str, ...]:
        """Our own listen multiaddrs without `/p2p/…`."""

    async def connect(self, address: PeerAddress) -> None:
        """Dial a peer. Raises Unreachable."""

    async def disconnect(self, peer: PeerId) -> None:
        """Close all connections to a peer."""

    async def connections(self) -> tuple[Connection, ...]:
        """All live connections."""

    async def open_stream(self, peer: PeerId, protocol: str) -> Stream:
        """Open a stream to a connected peer. Raises Unreachable."""

    async def forget_failures(self) -> None:
        """Dials that failed may be tried again at once; for nodes that are connected to nobody."""

    def set_handler(self, protocol: str, handler: Handler) -> None:
        """Serve `protocol`. May be called before `serve`."""

    def events(self) -> AsyncIterator[HostEvent]:
        """All events from now on; a bounded queue per subscriber."""

    def statistics(self) -> HostStatistics:
        """A snapshot."""
