"""What the status says of the network comes from the hosts that know it, through every layer of them."""

from types import SimpleNamespace

import pytest

from atoll.node.config.node_config import NodeConfig
from atoll.node.daemon.host_factory import make_host, route_host
from atoll.node.daemon.status import DaemonOperator
from atoll.node.daemon.telemetry.round_log import sent_per_round
from atoll.node.runs.presets import preset
from atoll.p2p.limits.config import read_limits
from atoll.p2p.limits.limited_host import LimitedHost
from atoll.protocols.identity import Identity
from atoll.protocols.ids import RunId
from atoll.protocols.local.control_messages import RoundStatus

ROW = RoundStatus(
    round=0, peer="me", digest="aa", payload_bytes=19_722, bytes_up=41_500, blob_bytes_up=39_560,
    blob_payload_up=39_444,
)  # fmt: skip
OUTSIDE, LOOPBACK = "/ip4/0.0.0.0/tcp/4710", "/ip4/127.0.0.1/tcp/4710"


@pytest.mark.parametrize(
    ("listen", "config", "ports"),
    [
        (OUTSIDE, NodeConfig(), {}),
        (LOOPBACK, NodeConfig(), None),
        (OUTSIDE, NodeConfig(port_map=False), None),
        (OUTSIDE, NodeConfig(transport="pylibp2p"), None),
    ],
)
def test_the_router_s_ports_and_what_is_sent_reach_the_status(tmp_path, listen, config, ports) -> None:
    identity = Identity(b"s" * 32)
    host = make_host((listen,), config, identity)
    limited = LimitedHost(host, read_limits(config.limits), tmp_path / "month")
    routed = route_host(limited, config, identity, RunId(bytes(32)), [], lambda peer, fault: None)
    others = dict.fromkeys(("net", "control", "trainer", "goodput", "web", "stop_daemon"))
    plan = SimpleNamespace(run=SimpleNamespace(spec=preset("tiny", identity.peer_id, 1)))
    log = SimpleNamespace(rows=dict.fromkeys(range(3), ROW))
    swarm = SimpleNamespace(discovery_table=dict)
    operator = DaemonOperator(plan=plan, log=log, host=routed, limited=limited, swarm=swarm, **others)
    shown = operator._network()
    assert shown["port_map"] == ports
    assert shown["sent"] == sent_per_round([ROW], 4 * plan.run.spec.model.parameters)
    assert 50 < shown["sent"].below_fp32 < 60
