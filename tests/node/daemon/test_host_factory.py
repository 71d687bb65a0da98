"""One port for both transports, the same after a restart, another when it is taken."""

import asyncio
import socket
from datetime import datetime

import pytest

from atoll.node.config.node_config import NodeConfig
from atoll.node.daemon.host_factory import NodeHost, plan_listen, route_host
from atoll.p2p.host.maddrs import is_loopback
from atoll.p2p.limits.config import LimitsConfig, read_limits
from atoll.p2p.limits.limited_host import LimitedHost
from atoll.p2p.limits.monthly_quota import Month, save_month
from atoll.p2p.transports.memory.memory_network import MemoryNetwork
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.errors import LocalFault
from atoll.protocols.identity import Identity
from atoll.protocols.ids import RunId
from tests.waiting import HANGS_S


def port_of(maddrs: tuple[str, ...]) -> int:
    return int(maddrs[0].rsplit("/", 1)[1])


def test_what_the_user_wants_is_taken_as_it_is(tmp_path):
    assert plan_listen(["/ip4/1.2.3.4/tcp/5"], 9, tmp_path / "port") == (("/ip4/1.2.3.4/tcp/5",), 0)


def test_a_given_port_serves_both_transports(tmp_path):
    plan = plan_listen([], 4710, tmp_path / "port")
    assert plan.maddrs[:2] == ("/ip4/0.0.0.0/tcp/4710", "/ip4/0.0.0.0/udp/4710/quic-v1")
    assert plan.picked_port == 0, "the user knows it"


def test_a_picked_port_is_kept_until_somebody_takes_it(tmp_path):
    path = tmp_path / "port"
    first = plan_listen([], 0, path)
    assert not path.exists(), "nothing is written before the user agreed"
    path.write_bytes(b"%d\n" % first.picked_port)
    assert plan_listen([], 0, path) == (first.maddrs, 0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", port_of(first.maddrs)))
        second = plan_listen([], 0, path)
    assert port_of(second.maddrs) == second.picked_port != first.picked_port


@pytest.mark.parametrize("text", [b"", b"nonsense", b"99999999", b"\xff" * 100])
def test_a_damaged_memory_is_no_memory(tmp_path, text):
    (tmp_path / "port").write_bytes(text)
    assert 1024 < port_of(plan_listen([], 0, tmp_path / "port").maddrs) < 65536


def test_loopback():
    assert all(map(is_loopback, ("/ip4/127.0.0.1/tcp/1", "/ip6/::1/tcp/1")))
    assert not all(map(is_loopback, ("/ip4/127.0.0.1/tcp/1", "/ip4/0.0.0.0/tcp/1")))


async def test_a_host_that_fails_later_leaves_its_owner_alone_and_tells_who_watches():
    """The daemon ends its parts in order and the user reads one line; a group of errors would be a traceback."""
    breaks = asyncio.Event()

    class BrokenHost:
        async def serve(self, ready) -> None:
            ready()
            await breaks.wait()
            raise LocalFault("p2pd ended five times in a row")

    async with asyncio.timeout(HANGS_S), asyncio.TaskGroup() as group:
        host = NodeHost(BrokenHost(), group)
        await host.start()
        breaks.set()
        with pytest.raises(LocalFault, match="five times"):
            await host.watch()
        await host.stop()


def test_a_node_whose_month_is_used_up_does_not_relay(tmp_path):
    async def main() -> None:
        identity = Identity(bytes(32))
        limits = read_limits(LimitsConfig(monthly="1MB"))
        for used_bytes, is_stopped in ((10**6 - 1, False), (10**6, True)):
            save_month(tmp_path / "month", Month("2026-11-01", used_bytes, 0))
            inner = MemoryNetwork().host(identity.peer_id)
            limited = LimitedHost(inner, limits, tmp_path / "month", local_now=lambda: datetime(2026, 11, 20))
            routed = route_host(
                limited, NodeConfig(relay=True), identity, RunId(bytes(32)), [], lambda peer, fault: None
            )
            ready = asyncio.Event()
            task = asyncio.get_running_loop().create_task(routed.serve(ready.set))
            await ready.wait()
            assert routed._options.is_stopped() is is_stopped
            task.cancel()
            await asyncio.wait([task])

    run_virtual(main())
