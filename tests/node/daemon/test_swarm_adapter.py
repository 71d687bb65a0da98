"""What the swarm's tasks tell the driver before a node is synced."""

from types import SimpleNamespace

import pytest

from atoll.node.daemon import swarm_adapter
from atoll.node.daemon.swarm_adapter import SwarmNetwork
from atoll.p2p.host.interface import Host
from atoll.p2p.transports.memory.memory_network import MemoryNetwork
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.identity import Identity
from atoll.protocols.ledger.records import Solved

ME = Identity(bytes(32)).peer_id


def test_what_a_quorum_names_is_more_than_what_a_proposer_does():
    asked = []
    swarm = SimpleNamespace(require=lambda *named: asked.append(named))
    net = SwarmNetwork(swarm, MemoryNetwork(seed=1).host(ME), ME)
    net.require([b"a"], ME)
    net.require([b"b"], None)
    assert asked == [([b"a"], ME), ([b"b"], None)]


@pytest.mark.parametrize("parts", [0, 3])
def test_a_puzzle_that_is_solved_is_not_said_to_be_at_work_any_more(parts, monkeypatch):
    monkeypatch.setattr(swarm_adapter, "TOLD_S", 0.0)
    said, published = [], []
    swarm = SimpleNamespace(
        ledger=SimpleNamespace(vector=dict, since=lambda cursor, count: []),
        expects_members=lambda: False,
        publish=published.append,
    )
    listener = SimpleNamespace(on_behind=said.append, on_synced=lambda: said.append("synced"))

    async def story() -> None:
        host: Host = MemoryNetwork(seed=1).host(ME)
        net = SwarmNetwork(swarm, host, ME, lambda: 5.0 + len(said), [*[None] * parts, Solved(7)])
        await net._report_synced(listener, 20.0)

    run_virtual(story())
    assert published == [Solved(7)]
    told = "solving the puzzle that this run asks of newcomers"
    assert said == [*[told] * parts, *[""] * (parts > 0), "synced"]
