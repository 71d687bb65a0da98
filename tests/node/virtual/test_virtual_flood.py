"""Whole nodes of an open run against made-up identities: the run goes on, and an honest newcomer gets in."""

from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.identity import Identity
from tests.p2p.swarm.flooder import Flooder, fake_work

MEMBERS = 3
MADE_UP = 10_000
ROUND_S = 10.0
IN_S = 60.0


def final_sets(node) -> list[set]:
    rows = node.driver.context.log.rows
    return [set(rows[number].contributors) for number in sorted(rows) if rows[number].final]


def test_a_newcomer_gets_into_a_flooded_run(world):
    """10,000 identities with contributions and leases are brought to all members, before and while it comes."""

    async def story() -> None:
        async with world(40, MEMBERS, quorum_256=192, lease_s=60.0) as w:
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
