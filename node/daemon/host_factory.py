"""The one network host of a node, built from its configuration: where it listens, its transport, and its routes.

A node listens on one port for TCP and QUIC, and on the same one after a restart: a router keeps its mapping, and
peers their cached address, only while the port stays the same. A hole that was punched through a router opens the
port that QUIC dials from, which is the one that it listens on.
"""

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from atoll.node.config.node_config import NodeConfig
from atoll.p2p.host.interface import Host, PeerAddress
from atoll.p2p.host.maddrs import is_loopback
from atoll.p2p.limits.limited_host import LimitedHost
from atoll.p2p.nat.relay import RelayLimits
from atoll.p2p.nat.route_host import RouteHost, RouteOptions
from atoll.p2p.system.atomic_files import read_whole
from atoll.p2p.transports.host_base import OnFault
from atoll.p2p.transports.p2pd.p2pd_host import P2pdHost
from atoll.p2p.transports.p2pd.process import P2pdOptions, require_free
from atoll.p2p.transports.pylibp2p.options import PyLibp2pOptions, refused_listen, unsupported
from atoll.protocols.errors import AtollError, ConfigError, CorruptFault, LocalFault, first_fault
from atoll.protocols.identity import Identity
from atoll.protocols.ids import RunId

_FIRST_PORT, _LAST_PORT = 20_000, 60_000
_TRIES = 200


class ListenPlan(NamedTuple):
    """The addresses on which a node will listen."""

    maddrs: tuple[str, ...]
    picked_port: int = 0
    """A port that was picked just now and must be remembered; 0: none was."""


def plan_listen(wanted: Sequence[str], port: int, remembered: Path) -> ListenPlan:
    """`wanted` as it is, or else every interface at `port`, by TCP and QUIC. Writes nothing.

    Port 0 means the one in the file `remembered` while it is free, else a free one that is picked. Raises
    DiskFault, and LocalFault when no port is free.
    """
    if wanted:
        return ListenPlan(tuple(wanted))
    known = port or _remembered_port(remembered)
    number = known or _pick_port()
    maddrs = tuple(f"/{ip}/{place}" for ip in ("ip4/0.0.0.0", *_ip6()) for place in _places(number))
    return ListenPlan(maddrs, 0 if known else number)


def make_host(listen: Sequence[str], config: NodeConfig, identity: Identity) -> Host:
    """The libp2p host that `config.transport` names, not started. Raises ConfigError for what it cannot do."""
    if config.transport == "pylibp2p":
        return _pylibp2p_host(listen, config, identity)
    port_map = config.port_map is not False and not all(map(is_loopback, listen))
    options = P2pdOptions(
        listen=tuple(listen),
        port_map=port_map,
        connections_low=config.connections // 2,
        connections_high=config.connections,
    )
    return P2pdHost(identity, options)


def _pylibp2p_host(listen: Sequence[str], config: NodeConfig, identity: Identity) -> Host:
    from atoll.p2p.transports.pylibp2p.pylibp2p_host import PyLibp2pHost

    wanted = {"port_map": config.port_map is True}
    refused = unsupported([name for name, is_wanted in wanted.items() if is_wanted])
    refused += refused_listen(config.listen)
    if refused:
        raise ConfigError(f"transport pylibp2p cannot do that: {'; '.join(refused)}", hint="use transport p2pd")
    # This transport has no QUIC. QUIC addresses come from our default, never from the user.
    tcp = tuple(maddr for maddr in listen if "/quic" not in maddr)
    return PyLibp2pHost(identity, PyLibp2pOptions(listen=tcp, connections_max=config.connections))


def route_host(
    host: LimitedHost,
    config: NodeConfig,
    identity: Identity,
    run: RunId,
    seeds: list[PeerAddress],
    on_fault: OnFault,
) -> RouteHost:
    """`host` with hole punching and relays."""
    limits = RelayLimits(
        circuits=config.relay_circuits,
        bytes_per_day=config.relay_bytes_per_day,
        rate_bytes_s=config.relay_rate_bytes_s,
    )
    options = RouteOptions(
        announce=config.announce,
        relay=limits if config.work.relays else None,
        is_stopped=lambda: bool(host.limits().stopped),
        relay_only=config.relay_only,
        trusted=frozenset(seed.peer for seed in seeds),
    )
    return RouteHost(host, identity, run, options, on_fault=on_fault)


@asynccontextmanager
async def host_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Owns the task of a NodeHost. Raises what its block raises, not a group of it."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as faults:
        if len(faults.exceptions) == 1:
            raise faults.exceptions[0] from None
        raise


class NodeHost:
    """The node's only transport host. It starts when it is first needed, and ends after everything that uses it.

    The run's file may be fetched over it before there is a swarm, so the swarm does not own it.
    """

    def __init__(self, host: Host, group: asyncio.TaskGroup) -> None:
        """`group` owns the host's task."""
        self.host = host
        self._group = group
        self._task: asyncio.Task[None] | None = None
        self._started = asyncio.Event()
        self._failed = asyncio.Event()
        self._fault: AtollError | None = None

    async def start(self) -> None:
        """Return when streams can be opened. Idempotent. Raises LocalFault if the host cannot start."""
        if self._task is None:
            self._task = self._group.create_task(self._serve(), name="host")
        await self._started.wait()
        self.check()

    @property
    def is_up(self) -> bool:
        """Whether streams can be opened."""
        return self._started.is_set() and self._fault is None

    def check(self) -> None:
        """Raise the fault that has ended the host, if one has."""
        if self._fault is not None:
            raise self._fault

    async def watch(self) -> None:
        """Raise the fault that ends the host, whenever that is. Runs until cancelled."""
        await self._failed.wait()
        self.check()

    async def stop(self) -> None:
        """End the host. Returns when it has ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def _serve(self) -> None:
        try:
            await self.host.serve(self._started.set)
        except* AtollError as faults:
            # Kept, not raised: the parts above the host must end in order, and the user gets one line.
            self._fault = first_fault(faults)
            self._started.set()
            self._failed.set()


def _places(port: int) -> tuple[str, str]:
    return f"tcp/{port}", f"udp/{port}/quic-v1"


def _ip6() -> tuple[str, ...]:
    """`ip6/::` if this machine speaks IPv6, else nothing."""
    if not socket.has_ipv6:
        return ()
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return ()
    return ("ip6/::",)


def _remembered_port(path: Path) -> int:
    """The port in the file if it is free; 0 without one."""
    try:
        data = (read_whole(path, max_bytes=32) or b"").strip()
    except CorruptFault:
        return 0
    port = int(data) if data.isdigit() else 0
    return port if 0 < port < 65536 and _is_free(port) else 0


def _pick_port() -> int:
    rng = random.SystemRandom()
    for _ in range(_TRIES):
        port = rng.randrange(_FIRST_PORT, _LAST_PORT)
        if _is_free(port):
            return port
    raise LocalFault(f"no free port between {_FIRST_PORT} and {_LAST_PORT}", hint="choose one with --port")


def _is_free(port: int) -> bool:
    """Nobody listens on `port`, by TCP or UDP. Another program may still take it before us."""
    try:
        require_free(tuple(f"/ip4/0.0.0.0/{place}" for place in _places(port)))
    except LocalFault:
        return False
    return True
