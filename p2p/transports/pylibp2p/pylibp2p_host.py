"""Host over py-libp2p: pure Python, in our own process, over TCP.

libp2p and trio are imported when `serve` starts, so that only a node that chose this transport pays for them
(0.5 s, 80 MB). An engine that dies of a bug is logged and started again with the same ports and handlers.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil

from atoll.p2p.host.interface import (
    DIAL_S,
    Connection,
    Handler,
    HostRestarted,
    PeerAddress,
    PeerConnected,
    PeerDisconnected,
    Route,
)
from atoll.p2p.transports.host_base import STABLE_S, HostBase, OnFault, log_fault, restart_pause_s
from atoll.p2p.transports.p2pd.process import require_free
from atoll.p2p.transports.pylibp2p.options import PyLibp2pOptions, refused_listen
from atoll.protocols.errors import LocalFault, Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId

if TYPE_CHECKING:
    from atoll.p2p.transports.pylibp2p.engine import Engine
    from atoll.p2p.transports.pylibp2p.pylibp2p_stream import PyLibp2pStream
    from atoll.p2p.transports.pylibp2p.trio_bridge import Guest
    from atoll.p2p.transports.pylibp2p.yamux import Lane

log = logging.getLogger(__name__)


class PyLibp2pHost(HostBase):
    """See `atoll.p2p.host.interface.Host`."""

    def __init__(
        self, identity: Identity, options: PyLibp2pOptions | None = None, *, on_fault: OnFault = log_fault
    ) -> None:
        super().__init__(identity.peer_id, on_fault)
        self._identity = identity
        self._options = options or PyLibp2pOptions()
        self._listen = self._options.listen
        self._guest: Guest | None = None
        self._engine: Engine | None = None

    async def serve(self, ready: Callable[[], None]) -> None:
        """Keep the network alive until cancelled. Raises LocalFault when it cannot start the first time."""
        if refused := refused_listen(self._listen):
            raise LocalFault(f"py-libp2p cannot listen on {refused[0]}", hint="choose the p2pd transport")
        require_free(self._listen)
        from atoll.p2p.transports.pylibp2p.trio_bridge import trio_guest

        # It logs what any peer can cause, as errors and with tracebacks; we log what matters.
        logging.getLogger("libp2p").setLevel(logging.CRITICAL)
        try:
            async with trio_guest() as self._guest, asyncio.TaskGroup() as self._group:
                try:
                    fault = await self._supervise(ready)
                finally:
                    self._group = None  # a group that ends accepts no task, and streams may still arrive
            raise fault  # not inside: a group would wrap it
        finally:
            self._guest = None
            self._announcer.end()

    async def addresses(self) -> tuple[str, ...]:
        """Addresses at which we may be dialled. Raises Unreachable while nothing is served."""
        engine, _ = self._live()
        return self._options.announce or tuple(one for maddr in engine.maddrs for one in _interfaces(maddr))

    async def connect(self, address: PeerAddress, within_s: float = DIAL_S) -> None:
        """Dial a peer. Raises Unreachable."""
        engine, guest = self._live()
        await guest.call(lambda: engine.dial(address, within_s), within=engine.nursery)

    async def disconnect(self, peer: PeerId) -> None:
        """Close all connections to a peer."""
        engine, guest = self._live()
        await guest.call(lambda: engine.close(peer), within=engine.nursery)

    async def connections(self) -> tuple[Connection, ...]:
        """All live connections; none during a restart."""
        links = self._engine.links() if self._engine is not None else ()
        return tuple(Connection(link.peer, link.maddr, Route.DIRECT) for link in links)

    async def open_stream(self, peer: PeerId, protocol: str) -> "PyLibp2pStream":
        """Open a stream to a connected peer. Raises Unreachable."""
        engine, guest = self._live()
        link = next((link for link in engine.links(peer) if link.nursery is not None), None)
        if link is None:
            raise Unreachable(f"not connected to {peer}")

        async def open_adopted() -> "PyLibp2pStream":
            lane = await link.open(protocol)
            stream = self._adopt(peer, protocol, lane, initiator=True)
            if link.nursery is None:
                stream.reset()
                raise Unreachable("the connection ended")
            link.nursery.start_soon(stream.carry)
            return stream

        return await guest.call(open_adopted, within=link.nursery, lost=lambda stream: stream.reset())

    def set_handler(self, protocol: str, handler: Handler) -> None:
        """Serve `protocol`, from now on and after every restart."""
        super().set_handler(protocol, handler)
        if self._engine is not None:
            self._engine.add_protocol(protocol)

    async def _supervise(self, ready: Callable[[], None]) -> LocalFault:
        """Run one engine after the other; returns why the first could not start."""
        loop = asyncio.get_running_loop()
        deaths = 0
        ever = False

        def on_ready(maddrs: tuple[str, ...]) -> None:
            nonlocal ever
            self._listen = maddrs
            if ever:
                self._restarts += 1
                self._announcer.announce(HostRestarted(self._restarts))
            else:
                ever = True
                ready()

        while True:
            born = loop.time()
            try:
                await self._run_engine(on_ready)
            except Exception as error:  # of py-libp2p, of trio or ours: the node survives it
                if not ever:
                    return _cannot_start(self._listen, error)
                log.exception("the network died")
            deaths = 1 if loop.time() - born > STABLE_S else deaths + 1
            await asyncio.sleep(restart_pause_s(deaths))

    async def _run_engine(self, ready: Callable[[tuple[str, ...]], None]) -> None:
        """Run an engine until it dies."""
        from atoll.p2p.transports.pylibp2p.connection import Upgrader
        from atoll.p2p.transports.pylibp2p.engine import Callbacks, Engine

        assert self._guest is not None
        upgrader = Upgrader(self._identity.libp2p_private_key()[4:36], self._options.keepalive_s)
        assert upgrader.peer_id == self.peer_id
        callbacks = Callbacks(
            connected=lambda peer: self._announcer.announce(PeerConnected(peer)),
            disconnected=lambda peer: self._announcer.announce(PeerDisconnected(peer)),
            inbound=self._on_inbound,
            ending=self._streams.reset_all,
        )
        engine = Engine(upgrader, tuple(self._handlers), self._options.connections_max, callbacks)

        def listening(maddrs: tuple[str, ...]) -> None:
            self._engine = engine
            ready(maddrs)

        try:
            await self._guest.call(lambda: engine.run(self._listen, listening))
        finally:
            self._engine = None
            self._streams.reset_all()

    def _on_inbound(self, peer: PeerId, protocol: str, lane: "Lane") -> "PyLibp2pStream | None":
        """Serve a stream that a peer opened; called in trio."""
        if self._group is None or not self._admission.enter(peer, protocol):
            return None
        stream = self._adopt(peer, protocol, lane, initiator=False)
        self._group.create_task(self._serve_stream(stream, self._handlers[protocol]))
        return stream

    def _adopt(self, peer: PeerId, protocol: str, lane: "Lane", *, initiator: bool) -> "PyLibp2pStream":
        from atoll.p2p.transports.pylibp2p.pylibp2p_stream import PyLibp2pStream

        return PyLibp2pStream(peer, protocol, self._streams, lane, initiator=initiator)

    def _live(self) -> "tuple[Engine, Guest]":
        if self._guest is None or self._engine is None or self._engine.nursery is None:
            raise Unreachable("the network is not running")
        return self._engine, self._guest


def _cannot_start(maddrs: tuple[str, ...], error: Exception) -> LocalFault:
    where = ", ".join(maddrs)
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        fault = LocalFault(f"the port is in use: {where}", hint="choose another port or stop the other program")
    elif isinstance(error, OSError):
        fault = LocalFault(f"cannot listen on {where}: {error.strerror or error}")
    else:
        fault = LocalFault(f"py-libp2p did not start: {error!r}")
    fault.__cause__ = error
    return fault


def _interfaces(maddr: str) -> tuple[str, ...]:
    """Return `maddr`, or one address for each interface when it listens on all of them."""
    _, kind, host, _, port = maddr.split("/")
    if host not in ("0.0.0.0", "::"):
        return (maddr,)
    family = socket.AF_INET if kind == "ip4" else socket.AF_INET6
    found = (each for interface in psutil.net_if_addrs().values() for each in interface)
    plain = (each.address for each in found if each.family == family)
    return tuple(f"/{kind}/{address}/tcp/{port}" for address in plain if not address.startswith("fe80:"))
