"""The Host interface: peers, streams and events, independent of the transport. Three transports implement it.

Every transport obeys these rules; `tests/p2p/transports/test_host_conformance.py` checks them:

- The initiator of a stream closes it; the responder closes after it has seen the initiator's end. A transfer is
over
  when the application acknowledged it, never when bytes were written.
- Callers own deadlines: every await here may be cancelled at any point (`asyncio.timeout`).
- A dead network raises Unreachable, nothing else. A handler that raises resets its stream; a PeerFault raised by a
  handler is reported to `on_fault`.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from atoll.protocols.ids import PeerId

DIAL_S = 30.0
"""Deadline of a transport for a dial whose caller names none."""


class Route(StrEnum):
    """How a peer is reached: by a plain dial, through a punched hole, or through a relay."""

    DIRECT = "direct"
    PUNCHED = "punched"
    RELAYED = "relayed"


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """A peer and the multiaddrs at which it may be dialled, without the `/p2p/…` part."""

    peer: PeerId
    maddrs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Connection:
    """One live connection to a peer."""

    peer: PeerId
    maddr: str
    path: Route

    @classmethod
    def over(cls, peer: PeerId, maddr: str) -> "Connection":
        """A connection whose remote multiaddr says whether it is relayed."""
        return cls(peer, maddr, Route.RELAYED if "/p2p-circuit" in maddr else Route.DIRECT)


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
    """The transport's own process was restarted: same PeerID and handlers, all streams lost."""

    restarts: int
    """Number of restarts so far."""


HostEvent = PeerConnected | PeerDisconnected | HostRestarted


class Stream(Protocol):
    """A bidirectional byte stream to one peer."""

    @property
    def peer(self) -> PeerId:
        """PeerID of the other side, authenticated by the transport."""

    @property
    def protocol(self) -> str:
        """Protocol id of the stream."""

    async def read_exactly(self, size: int) -> bytes:
        """Read `size` bytes. Raises Unreachable when the stream ends before."""

    async def write(self, data: bytes | memoryview) -> None:
        """Write all of `data`, waiting while buffers are full. Raises Unreachable."""

    async def close(self) -> None:
        """End our side after all written bytes. Idempotent."""

    def reset(self) -> None:
        """Abort the stream in both directions, without waiting. Idempotent."""


Handler = Callable[[Stream], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class HostStatistics:
    """Traffic of all streams since the host started, in bytes; its own process and its port at the router."""

    bytes_up: int
    bytes_down: int
    streams_open: int
    restarts: int
    port_map: dict[str, int] | None = None
    """Our router's ports by transport (`tcp`, `udp`) that lead to us; empty: none; None: no router is asked."""


class Host(Protocol):
    """A libp2p host, real or simulated."""

    @property
    def peer_id(self) -> PeerId:
        """PeerID of this node."""

    async def serve(self, ready: Callable[[], None]) -> None:
        """Run until cancelled; call `ready` once when streams can be opened.

        Raises LocalFault if the host can never start (port in use). Later deaths of a helper process are repaired
        and reported as HostRestarted.
        """

    async def addresses(self) -> tuple[str, ...]:
        """Our own listen multiaddrs without `/p2p/…`."""

    async def connect(self, address: PeerAddress, within_s: float = DIAL_S) -> None:
        """Dial a peer. Raises Unreachable.

        The transport ends the dial after `within_s`, also when the caller has stopped waiting: a new dial of the
        peer may join one that still hangs, and would wait for its retransmissions.
        """

    async def disconnect(self, peer: PeerId) -> None:
        """Close all connections to a peer."""

    async def favour(self, peer: PeerId) -> None:
        """Close connections of others first where there are too many, until this one is lost. Raises nothing."""

    async def connections(self) -> tuple[Connection, ...]:
        """All live connections."""

    async def open_stream(self, peer: PeerId, protocol: str) -> Stream:
        """Open a stream to a connected peer. Raises Unreachable."""

    async def forget_failures(self) -> None:
        """Drop the transport's own dial back-off, so that failed addresses can be dialled again at once."""

    def set_handler(self, protocol: str, handler: Handler) -> None:
        """Serve `protocol`. May be called before `serve`."""

    def events(self) -> AsyncIterator[HostEvent]:
        """Iterate over all events from now on; each subscriber has a bounded queue."""

    def statistics(self) -> HostStatistics:
        """Traffic totals so far, and restarts."""
