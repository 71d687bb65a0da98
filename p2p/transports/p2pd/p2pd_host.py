"""Host over hivemind's p2pd: our own launch, supervision and control client.

`serve` keeps one p2pd alive. When it dies every stream ends at once, and it comes back after a back-off
with the same PeerID, the same ports and all handlers.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from atoll.p2p.host.interface import (
    DIAL_S,
    Connection,
    Handler,
    HostRestarted,
    HostStatistics,
    PeerAddress,
    PeerConnected,
    PeerDisconnected,
)
from atoll.p2p.transports.host_base import STABLE_S, HostBase, OnFault, log_fault, restart_pause_s
from atoll.p2p.transports.p2pd.connection_replacements import OPEN_S, ConnectionReplacements
from atoll.p2p.transports.p2pd.control_client import P2pdControl, read_message
from atoll.p2p.transports.p2pd.p2pd_stream import P2pdStream
from atoll.p2p.transports.p2pd.private_folder import make_own, private_folder
from atoll.p2p.transports.p2pd.process import (
    CONTROL_SOCKET,
    STREAMS_SOCKET,
    P2pdOptions,
    P2pdProcess,
    require_free,
    with_port,
)
from atoll.p2p.transports.p2pd.schema import messages
from atoll.p2p.transports.p2pd.unix_socket import UnixSocket, listen_at, take_streams
from atoll.protocols.errors import DecodeError, LocalFault, Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId, peer_from_bytes

log = logging.getLogger(__name__)


class P2pdHost(HostBase):
    """See `atoll.p2p.host.interface.Host`."""

    def __init__(
        self,
        identity: Identity,
        options: P2pdOptions | None = None,
        *,
        on_fault: OnFault = log_fault,
        poll_s: float = 1.0,
    ) -> None:
        """`poll_s`: how often connections are compared to find peers that came or left."""
        super().__init__(identity.peer_id, on_fault)
        self._identity = identity
        self._options = options or P2pdOptions()
        self._poll_s = poll_s
        self._listen = self._options.listen
        self._peers: set[PeerId] = set()
        self._replacements = ConnectionReplacements()
        self._is_stopping = False
        """The next death of p2pd is one that we asked for."""
        self._control: P2pdControl | None = None
        self._folder: Path | None = None
        self._process: P2pdProcess | None = None
        self._attached: UnixSocket | None = None

    @property
    def control_socket(self) -> Path:
        """p2pd's Unix socket, the same over restarts. Raises LocalFault unless `serve` runs."""
        if self._folder is None:
            raise LocalFault("the network is not being served")
        return self._folder / CONTROL_SOCKET

    @property
    def process_id(self) -> int:
        """Process id of p2pd. Raises Unreachable while p2pd does not run."""
        if self._process is None:
            raise Unreachable("p2pd is not running")
        return self._process.pid

    async def serve(self, ready: Callable[[], None]) -> None:
        """Keep p2pd alive until cancelled. Raises LocalFault when it cannot start the first time."""
        with private_folder() as folder:
            require_free(self._listen)
            self._folder = folder
            listener = listen_at(folder / STREAMS_SOCKET)
            try:
                await self._start_first()
                async with asyncio.TaskGroup() as self._group:
                    self._accepting = self._group.create_task(take_streams(listener, self._group, self._inbound))
                    self._group.create_task(self._watch_peers())
                    try:
                        await self._supervise(ready)
                    finally:
                        self._group = None  # a group that ends accepts no task, and streams may still arrive
            finally:
                listener.close()
                await self._stop()
                self._folder = None
                self._announcer.end()

    async def addresses(self) -> tuple[str, ...]:
        """Listen and observed multiaddrs, relay addresses included. Raises Unreachable during a restart."""
        return (await self._live().identify())[1]

    async def connect(self, address: PeerAddress, within_s: float = DIAL_S) -> None:
        """Dial a peer. Raises Unreachable."""
        await self._live().connect(address.peer, address.maddrs, within_s)
        self._replacements.on_dialled(address)
        self._on_connected(address.peer)

    async def disconnect(self, peer: PeerId) -> None:
        """Close all connections to a peer."""
        await self._live().disconnect(peer)
        self._on_disconnected(peer)

    async def favour(self, peer: PeerId) -> None:
        """See `Host.favour`."""
        with contextlib.suppress(Unreachable):
            await self._live().favour(peer)

    async def connections(self) -> tuple[Connection, ...]:
        """All live connections; none during a restart."""
        return tuple(Connection.over(*each) for each in await self._list_peers())

    async def open_stream(self, peer: PeerId, protocol: str) -> P2pdStream:
        """Open a stream to a connected peer. Raises Unreachable."""
        began_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(OPEN_S):
                found = await self._live().open_stream(peer, protocol)
        except TimeoutError as error:
            await self._replacements.replace(self, peer, began_s)
            raise Unreachable("the connection took no more streams, and was replaced") from error
        self._on_connected(peer)
        return P2pdStream(peer, protocol, self._streams, found, initiator=True)

    def statistics(self) -> HostStatistics:
        """Return a snapshot."""
        ports = dict(self._process.port_map) if self._process else {}
        return replace(super().statistics(), port_map=ports if self._options.port_map else None)

    async def forget_failures(self) -> None:
        """Restart p2pd if it has no connection: nothing else ends go-libp2p's dial back-off."""
        if self._process is not None and not self._peers:
            self._is_stopping = True
            await self._process.stop()

    def set_handler(self, protocol: str, handler: Handler) -> None:
        """Serve `protocol`, from now on and after every restart."""
        known = protocol in self._handlers
        self._handlers[protocol] = handler
        if not known and self._group is not None and self._control is not None:
            self._group.create_task(self._register((protocol,)))

    async def _start_first(self) -> None:
        try:
            await self._start()
        except Unreachable as error:
            raise LocalFault(f"p2pd died while it started: {error}") from error

    async def _start(self) -> None:
        """Start a p2pd that answers, and register our handlers. Raises LocalFault, Unreachable."""
        assert self._folder is not None
        self._process = await P2pdProcess.start(self._options, self._listen, self._identity, self._folder)
        control = P2pdControl(str(self._folder / CONTROL_SOCKET))
        self._attached = await control.attach()
        peer, maddrs = await control.identify()
        if peer != self.peer_id:
            raise LocalFault(f"p2pd runs as {peer}, not as {self.peer_id}")
        self._listen = tuple(with_port(maddr, maddrs) for maddr in self._listen)
        self._control = control
        await self._register(tuple(self._handlers))

    async def _stop(self) -> None:
        """End p2pd and every stream."""
        self._control = None
        self._streams.reset_all()
        for peer in tuple(self._peers):
            self._on_disconnected(peer)
        attached, self._attached = self._attached, None
        if attached is not None:
            attached.abort()
        process, self._process = self._process, None
        if process is not None:
            await process.stop()

    async def _supervise(self, ready: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        deaths = 0
        ready()
        while True:
            born = loop.time()
            await self._until_dead()
            await self._stop()
            deaths = await self._start_again(0 if loop.time() - born > STABLE_S else deaths)
            self._announcer.announce(HostRestarted(self._restarts))

    async def _until_dead(self) -> None:
        assert self._process is not None
        await self._process.exited()
        if self._is_stopping:
            log.info("p2pd starts anew, to forget failed dials")
            self._is_stopping = False
        else:
            self._restarts += 1
            log.warning("p2pd died: %s", self._process.last_words())

    async def _start_again(self, deaths: int) -> int:
        """Try until p2pd is back; returns how many deaths and failed starts came in a row."""
        while True:
            deaths += 1
            await asyncio.sleep(restart_pause_s(deaths))
            try:
                self._keep_folder()
                await self._start()
            except (LocalFault, Unreachable, OSError) as error:
                log.warning("p2pd is not back yet: %s", error)
                await self._stop()
            else:
                return deaths

    def _keep_folder(self) -> None:
        """Make the folder and the socket of streams again where a cleaner of /tmp took them. Raises OSError."""
        path = self.control_socket.with_name(STREAMS_SOCKET)
        if self._group is not None and not path.exists():
            make_own(path.parent)
            listener = listen_at(path)
            self._accepting.cancel()
            self._accepting = self._group.create_task(take_streams(listener, self._group, self._inbound))

    async def _register(self, protocols: tuple[str, ...]) -> None:
        assert self._folder is not None
        for protocol in protocols:
            with contextlib.suppress(Unreachable):  # p2pd died; its successor gets all handlers
                await self._live().register(protocol, str(self._folder / STREAMS_SOCKET))

    async def _watch_peers(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            await self._list_peers()
            control, process = self._control, self._process
            if control and process and (why := control.silence or process.datedness):
                log.warning("p2pd %s: it is ended, and another one starts", why)
                await process.stop()

    async def _list_peers(self) -> tuple[tuple[PeerId, str], ...]:
        """Peers with an address of each, after an event for each that came or left; none during a restart."""
        before = set(self._peers)
        try:
            listed = await self._live().list_peers()
        except Unreachable:
            return ()
        peers = {peer for peer, _ in listed}
        for peer in before - peers:
            self._on_disconnected(peer)
        for peer in peers - self._peers:
            self._on_connected(peer)
        return listed

    async def _inbound(self, found: UnixSocket) -> None:
        """Serve one stream that p2pd hands to us: its peer and protocol come first, then its bytes."""
        try:
            info = await read_message(found, messages().StreamInfo)
            peer, handler = peer_from_bytes(info.peer), self._handlers[info.proto]
        except (OSError, asyncio.IncompleteReadError, Unreachable, DecodeError, KeyError):
            return found.abort()
        except asyncio.CancelledError:
            found.abort()
            raise
        if not self._admission.enter(peer, info.proto):
            return found.abort()
        self._on_connected(peer)
        stream = P2pdStream(peer, info.proto, self._streams, found, initiator=False)
        await self._serve_stream(stream, handler)

    def _live(self) -> P2pdControl:
        if self._control is None:
            raise Unreachable("p2pd is not running")
        return self._control

    def _on_connected(self, peer: PeerId) -> None:
        if peer not in self._peers and self._control is not None:
            self._peers.add(peer)
            self._announcer.announce(PeerConnected(peer))

    def _on_disconnected(self, peer: PeerId) -> None:
        if peer in self._peers:
            self._peers.discard(peer)
            self._announcer.announce(PeerDisconnected(peer))
