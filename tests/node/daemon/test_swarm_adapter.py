"""What the swarm's tasks tell the driver before a node is synced."""

import asyncio
from types import SimpleNamespace

import pytest

from atoll.node.daemon import driver_factory, swarm_adapter
from atoll.node.daemon.swarm_adapter import SwarmNetwork
from atoll.p2p.host.interface import Host
from atoll.p2p.transports.memory.memory_network import MemoryNetwork
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.errors import DiskFault
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


def test_an_entry_that_the_disk_refused_makes_a_comparison_old():
    now = [0.0]

    def full(body):
        raise DiskFault("no space left", hint="free some space")

    swarm = SimpleNamespace(publish=full, publish_register=lambda *given: None, end_replay=lambda: None)
    net = SwarmNetwork(swarm, MemoryNetwork(seed=1).host(ME), ME, lambda: now[0])
    net.put_lease(None, 60.0)
    now[0] = 61.0
    assert net.must_compare()
    net.end_replay()
    assert net.down_s(120.0) == 61.0
    assert not net.must_compare()
    with pytest.raises(DiskFault):
        net.publish(None)
    assert net.must_compare()


def test_who_is_in_no_final_set_is_a_stranger_to_downloads_once_there_is_one():
    asked = []

    async def take_pushed(blob, max_bytes):
        asked.append((blob, max_bytes))

    newcomers = SimpleNamespace(is_pressed=False, is_accepted={ME}.__contains__)
    swarm = SimpleNamespace(newcomers=newcomers, take_pushed=take_pushed)
    net = SwarmNetwork(swarm, MemoryNetwork(seed=1).host(ME), ME)
    machines = SimpleNamespace(finality=SimpleNamespace(last_final=-1))
    common = SimpleNamespace(
        net=net,
        machines=machines,
        worker=None,
        context=SimpleNamespace(me=ME, now=lambda: 1.0),
        queue=SimpleNamespace(start_task=None, post=None),
        guard=SimpleNamespace(blame=None, on_disk_fault=None),
    )
    payloads = driver_factory._build_payloads(common)
    assert not payloads._line_of("new").is_stranger, "the first members of a run are no strangers"
    machines.finality.last_final = 0
    assert [payloads._line_of(peer).is_stranger for peer in (ME, "new")] == [False, True]
    run_virtual(payloads.pushed(b"blob", 7))
    assert asked == [(b"blob", 7)]


def test_entries_that_never_end_keep_no_node_from_its_votes():
    """One more is stored whenever it looks, as in a flood. It waits for those that are there when it begins."""
    told = []

    async def flood(cursor):
        for number in range(1, 300):
            if number > 3:
                await asyncio.sleep(0)
            yield number, f"entry {number}"

    swarm = SimpleNamespace(entries=flood, ledger=SimpleNamespace(since=lambda cursor, count: ["one more"]))
    listener = SimpleNamespace(on_entry=told.append, on_synced=lambda: told.append("synced"))

    async def story() -> None:
        net = SwarmNetwork(swarm, MemoryNetwork(seed=1).host(ME), ME)
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(net._tell_synced(listener))
            await asyncio.sleep(0)
            await net._carry_entries(listener)
            asked.cancel()

    run_virtual(story())
    assert "entry 3" in told[: told.index("synced")]
    assert told.index("synced") < 10, "it waited for the end"


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
