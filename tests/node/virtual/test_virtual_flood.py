"""Whole nodes of an open run against made-up identities: the run goes on, and an honest newcomer gets in."""

import asyncio
import random

import pytest

from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.ledger.newcomers import NewcomerQuota
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round, digest
from atoll.protocols.ledger.coverage import payload_size
from atoll.protocols.ledger.records import MAX_SET, Contribution, encode_entry, sign_entry
from tests.p2p.swarm.flooder import Flooder, fake_work

MEMBERS = 3
MADE_UP = 10_000
ROUND_S = 10.0
IN_S = 60.0


def final_sets(node) -> list[set]:
    rows = node.driver.context.log.rows
    return [set(rows[number].contributors) for number in sorted(rows) if rows[number].final]


@pytest.mark.slow(slice="test_a_newcomer_gets_into_a_flooded_run")
def test_more_authors_than_a_set_may_name_end_no_round(world):
    """A member brings made-up identities, each with a legal payload of its own: all of them are held.

    With as many as a set may name its proposer could not write it down, nor could any worker fold it.
    """

    async def story() -> None:
        async with world(40, 4, quorum_256=192, lease_s=20.0) as w:
            for number in range(4):
                w.start(number)
            await w.until(lambda: w.all_final(2))
            liar, victims, rng = w.nodes[3], [w.nodes[number] for number in range(3)], random.Random(1)
            for node in victims:
                # As many places as a user may give newcomers: the more come through.
                node.swarm.newcomers.quota = NewcomerQuota(4 * MAX_SET)
            target, crowd = w.newest() + 3, set()
            while len(crowd) < MAX_SET + 40:
                for _ in range(100):
                    who, size = Identity(rng.randbytes(32)), payload_size(w.spec, target, b"")
                    payload = liar.swarm.blobs.store.add_bytes(rng.randbytes(size))
                    body = Contribution(Round(target), digest(b"base"), payload, 1, 1, 1, 1.0)
                    entry = sign_entry(w.spec.id, who, 0, b"", body)
                    crowd.add(who.peer_id)
                    for node in victims:
                        node.swarm.replication._on_entry(liar.peer, encode_entry(entry))
                await asyncio.sleep(1.0)
            await w.until(lambda: all(node.worker.final > target + 2 for node in victims), 300.0)
            named = final_sets(victims[0])[target]
            assert {node.peer for node in victims} <= named
            assert len(named) == MAX_SET
            w.check_agreement()

    run_virtual(story())


def test_a_newcomer_gets_into_a_flooded_run(world):
    """10,000 identities with contributions and leases are brought to all members, before and while it comes."""

    async def story() -> None:
        async with world(40, MEMBERS) as w:
            for number in range(MEMBERS):
                w.start(number)
            await w.until(lambda: w.all_final(1))
            calm = w.nodes[0].worker.final
            places = [PeerAddress(host.peer_id, (host.maddr,)) for host in w.hosts.values()]
            flood = Flooder(w.spec.id, MADE_UP, [fake_work(calm + 3)])
            host = w.network.host(Identity(bytes([200]) * 32).peer_id)
            task = w._group.create_task(flood.serve(host, places))
            took_s = await w.until(lambda: flood.sent >= MADE_UP // 2)
            newcomer = w.start(MEMBERS)
            in_s = await w.until(lambda: any(newcomer.peer in names for names in final_sets(w.nodes[0])), 600.0)
            assert in_s <= IN_S
            took_s += in_s + await w.until(lambda: flood.sent >= MADE_UP)
            task.cancel()
            rounds = w.nodes[0].worker.final - calm
            assert rounds >= took_s / ROUND_S - 2, "the rounds go on at their pace"
            fakes = {author.peer_id for author in flood.authors}
            for node in w.nodes.values():
                assert not fakes & {*node.driver.finality.voters}.union(*final_sets(node))
                accepted, _, new = node.swarm.newcomers.counts
                assert accepted == MEMBERS + 1
                assert new <= node.swarm.newcomers.quota.authors
                assert len(node.swarm.ledger.vector()) == sum(node.swarm.newcomers.counts)
                assert len(node.driver.contributions.payloads()) < 1000, "what is pruned is forgotten here, too"
                print(f"in {in_s} s, {rounds} rounds in {took_s} s, {node.swarm.newcomers.counts}")
                print(node.swarm.newcomers.pruned, node.swarm.ledger.disk_bytes, sum(map(len, flood.entries)))
            assert w.nodes[0].swarm.ledger.disk_bytes < 8 << 20, "most of it is SQLite's log, 4 MiB"
            w.check_agreement()

    run_virtual(story())
