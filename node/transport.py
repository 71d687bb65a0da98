"""The network of one node, built from its config: a transport, and the routes over it."""

from atoll.node.config import NodeConfig
from atoll.node.home import Home
from atoll.node.ports import is_loopback, listen_maddrs
from atoll.p2p.host import Host, PeerAddress
from atoll.p2p.nat.relay import RelayLimits
from atoll.p2p.nat.routes import RouteHost, RouteOptions
from atoll.p2p.transports.handling import OnFault
from atoll.p2p.transports.p2pd import P2pdHost
from atoll.p2p.transports.p2pd_process import P2pdOptions
from atoll.protocols.identity import Identity
from atoll.protocols.ids import RunId


def p2pd_host(home: Home, config: NodeConfig, identity: Identity) -> P2pdHost:
    """go-libp2p as a child process. Raises DiskFault, LocalFault."""
    listen = listen_maddrs(config.listen, config.port, home.port)
    return P2pdHost(identity, P2pdOptions(listen=listen, port_map=config.port_map and not is_loopback(listen)))


def route_host(
    base: Host, config: NodeConfig, identity: Identity, run: RunId, seeds: list[PeerAddress], on_fault: OnFault
) -> RouteHost:
    """`base` with punched holes and relays."""
    limits = RelayLimits(
        circuits=config.relay_circuits,
        bytes_per_day=config.relay_bytes_per_day,
        rate_bytes_s=config.relay_rate_bytes_s,
    )
    options = RouteOptions(
        announce=config.announce,
        relay=limits if config.relay else None,
        relay_only=config.relay_only,
        trusted=frozenset(seed.peer for seed in seeds),
    )
    return RouteHost(base, identity, run, options, on_fault=on_fault)
