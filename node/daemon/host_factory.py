"""The network of one node, built from its config: a transport, and the routes over it."""

from atoll.node.config.home import Home
from atoll.node.config.node_config import NodeConfig
from atoll.node.config.ports import listen_maddrs
from atoll.p2p.host.endpoint import is_loopback
from atoll.p2p.host.interface import Host, PeerAddress
from atoll.p2p.nat.relay import RelayLimits
from atoll.p2p.nat.route_host import RouteHost, RouteOptions
from atoll.p2p.transports.inbound_stream import OnFault
from atoll.p2p.transports.p2pd.p2pd_host import P2pdHost
from atoll.p2p.transports.p2pd.process import P2pdOptions
from atoll.p2p.transports.pylibp2p.options import PyLibp2pOptions, refused_listen, unsupported
from atoll.protocols.errors import ConfigError
from atoll.protocols.identity import Identity
from atoll.protocols.ids import RunId


def base_host(home: Home, config: NodeConfig, identity: Identity) -> Host:
    """The libp2p of this node. Raises ConfigError for what it cannot do, DiskFault, LocalFault."""
    if config.transport == "pylibp2p":
        return _pylibp2p_host(home, config, identity)
    listen = listen_maddrs(config.listen, config.port, home.port)
    port_map = config.port_map is not False and not all(map(is_loopback, listen))
    options = P2pdOptions(
        listen=listen,
        port_map=port_map,
        connections_low=config.connections // 2,
        connections_high=config.connections,
    )
    return P2pdHost(identity, options)


def _pylibp2p_host(home: Home, config: NodeConfig, identity: Identity) -> Host:
    from atoll.p2p.transports.pylibp2p.pylibp2p_host import PyLibp2pHost

    wanted = {"port_map": config.port_map is True}
    refused = unsupported([name for name, is_wanted in wanted.items() if is_wanted])
    if config.dht:
        refused.append("dht: hivemind's DHT speaks through p2pd")
    refused += refused_listen(config.listen)
    if refused:
        raise ConfigError(f"transport pylibp2p cannot do that: {'; '.join(refused)}", hint="use transport p2pd")
    # QUIC places are ours, not the user's: this transport has none.
    listen = [maddr for maddr in listen_maddrs(config.listen, config.port, home.port) if "/quic" not in maddr]
    return PyLibp2pHost(identity, PyLibp2pOptions(listen=tuple(listen), connections_max=config.connections))


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
