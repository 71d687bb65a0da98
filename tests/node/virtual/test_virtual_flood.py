"""Whole nodes of an open run against made-up identities: the run goes on, and an honest newcomer gets in."""

import asyncio
import random

import pytest

from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.ledger.newcomers import NewcomerQuota
from atoll.p2p.ledger.shares import Quota
from atoll.p2p.limits.bringer_rates import BringerRates
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Digest, Round, digest
from atoll.protocols.ledger.coverage import payload_size
from atoll.protocols.ledger.records import MAX_SET, Ballot, Contribution, Proposal, encode_entry, sign_entry
from tests.p2p.swarm.flooder import Flooder, anything, fake_work

MEMBERS = 3
FLOOD_S = 60.0
MADE_UP = 10_000
ROUND_S = 10.0
IN_S = 60.0
MORE_MADE_UP = pytest.mark.slow(slice="test_a_newcomer_gets_into_a_flooded_run[2000-True]")


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
                # And as many at once: the rate is another test's.
                rates = BringerRates(16 * MAX_SET, node.swarm.newcomers._now, node.swarm.newcomers.block_of)
                node.swarm.newcomers._rates = rates
            target, crowd = w.newest() + 8, set()  # all are verified before it begins
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


def test_a_run_goes_on_while_accepted_identities_write_all_that_they_can(world):
    """Forty of them, each with work in one final set, bring large records to ledgers of 24 MiB."""

    async def story() -> None:
        async with world(400, MEMBERS) as w:
            for number in range(MEMBERS):
                w.start(number)
            await w.until(lambda: w.all_final(1))
            rng, small = random.Random(1), Quota(disk_bytes=24 << 20)
            crowd = [Identity(rng.randbytes(32)) for _ in range(40)]
            for node in w.nodes.values():
                node.swarm.newcomers.shares.quota = small
                node.swarm.ledger._db.rows(f"PRAGMA max_page_count={small.disk_bytes // 4096}")
                node.swarm.newcomers.accept(author.peer_id for author in crowd)
            before, names = w.nodes[0].worker.final, tuple(sorted(Digest(rng.randbytes(32)) for _ in range(1000)))
            feeds = [(author, 0, b"") for author in crowd]
            while feeds:
                author, seq, previous = feeds.pop(0)
                body = Proposal(Round(300), Ballot(seq, author.peer_id), names, digest(b"state"))
                entry = sign_entry(w.spec.id, author, seq, previous, body)
                for node in w.nodes.values():
                    node.swarm.replication._on_entry(author.peer_id, encode_entry(entry))
                if any(node.swarm.ledger.get(entry.id) for node in w.nodes.values()):
                    feeds.append((author, seq + 1, entry.id))
                await asyncio.sleep(0.05)
            now = w.newest()
            await w.until(lambda: w.all_final(now + 3), 200.0)
            assert now > before, "while they wrote, too"
            newcomer = w.start(MEMBERS)
            await w.until(lambda: any(newcomer.peer in names for names in final_sets(w.nodes[0])), 200.0)
            for number in range(MEMBERS):
                swarm = w.nodes[number].swarm
                assert swarm.ledger._db.used_bytes < small.disk_bytes * 7 // 8
                assert swarm.replication.local_fault is None
                assert w.nodes[number].driver.guard.trouble == ""
                assert swarm.ledger.refusal(crowd[0].peer_id)
                assert not any(swarm.ledger.refusal(node.peer) for node in w.nodes.values())
            w.check_agreement()

    run_virtual(story())


@pytest.mark.parametrize(
    ("made_up", "is_anything"),
    [
        (2_000, True),
        pytest.param(MADE_UP, False, marks=MORE_MADE_UP),
        pytest.param(MADE_UP, True, marks=MORE_MADE_UP),
    ],
)
def test_a_newcomer_gets_into_a_flooded_run(world, made_up, is_anything):
    """10,000 identities with contributions and leases are brought to all members, before and while it comes.

    With ballots, epochs and votes to exclude as well, and leases that offer a snapshot of a later round.
    """

    async def story() -> None:
        async with world(200 if is_anything else 40, MEMBERS) as w:
            for number in range(MEMBERS):
                w.start(number)
            await w.until(lambda: w.all_final(1))
            calm = w.nodes[0].worker.final
            places = [PeerAddress(host.peer_id, (host.maddr,)) for host in w.hosts.values()]
            bodies = anything(calm + 3) if is_anything else [fake_work(calm + 3)]
            offer = (Round(calm + 30), digest(b"a snapshot")) if is_anything else None
            flood = Flooder(w.spec.id, made_up, bodies, offer=offer)
            host = w.network.host(Identity(bytes([200]) * 32).peer_id)
            task = w._group.create_task(flood.serve(host, places))
            took_s = await w.until(lambda: flood.sent >= len(flood.entries) // 2)
            newcomer = w.start(MEMBERS)
            in_s = await w.until(lambda: any(newcomer.peer in names for names in final_sets(w.nodes[0])), 600.0)
            assert in_s <= IN_S
            took_s += in_s + await w.until(lambda: flood.sent >= len(flood.entries))
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
            most_bytes = 24 << 20 if is_anything else 8 << 20
            assert w.nodes[0].swarm.ledger.disk_bytes < most_bytes, "most of it is SQLite's log, 4 MiB"
            w.check_agreement()

    run_virtual(story())


PLACES = 24
"""Accepted authors of which each ledger has room here, so that a short flood takes all places."""


BLOCK = pytest.param(
    "a block",
    marks=pytest.mark.slow(
        slice=(
            "test_noise_of_legal_size_closes_no_run_and_decides_nothing[a member], "
            "tests/node/virtual/test_virtual_many_blocks.py::"
            "test_a_newcomer_gets_into_a_run_that_many_blocks_flood[3000-60.0]"
        )
    ),
)


@pytest.mark.parametrize("bringer", ["a member", BLOCK])
def test_noise_of_legal_size_closes_no_run_and_decides_nothing(world, monkeypatch, bringer):
    """Made-up identities, each with a payload of its own that nobody trained: all of it counts as work.

    A member brings them, or six strangers of one address block do.
    """

    async def story() -> None:
        async with world(60, 4) as w:
            for number in range(4):
                w.start(number)
            await w.until(lambda: w.all_final(1))
            liar, victims, rng = w.nodes[3], [w.nodes[number] for number in range(3)], random.Random(1)
            strangers = [Identity(rng.randbytes(32)).peer_id for _ in range(6)]
            brought, rate = ([liar.peer], 1) if bringer == "a member" else (strangers, 2)
            rate *= NewcomerQuota().per_minute
            for node in victims:
                newcomers, known = node.swarm.newcomers, node.swarm.newcomers._maddr_of
                maddrs = {peer: "/ip4/10.9.9.1/tcp/1" for peer in brought if peer != liar.peer}
                monkeypatch.setattr(newcomers, "_maddr_of", lambda peer, a=maddrs, b=known: a.get(peer) or b(peer))
            for node in w.nodes.values():
                node.swarm.newcomers.accepted.most = PLACES
            crowd: set[str] = set()
            newcomer, came_s, in_s, began = None, 0.0, None, w.nodes[0].driver.context.now()
            while (now := w.nodes[0].driver.context.now()) < began + FLOOD_S:
                for _ in range(8):
                    who, target = Identity(rng.randbytes(32)), Round(w.newest())
                    payload = liar.swarm.blobs.store.add_bytes(rng.randbytes(payload_size(w.spec, target, b"")))
                    body = Contribution(target, digest(b"base"), payload, 1, 1, 1, 1.0)
                    entry = encode_entry(sign_entry(w.spec.id, who, 0, b"", body))
                    crowd.add(who.peer_id)
                    for node in victims:
                        node.swarm.replication._on_entry(brought[len(crowd) % len(brought)], entry)
                await asyncio.sleep(1.0)
                if newcomer is None and now > began + FLOOD_S / 3:
                    newcomer, came_s = w.start(4), now
                if in_s is None and newcomer and any(newcomer.peer in names for names in final_sets(victims[0])):
                    in_s = now - came_s
                assert not any(crowd & set(node.driver.finality.voters) for node in victims)
            named = [len(names & crowd) for names in final_sets(victims[0])]
            print(f"{len(crowd)} made up, in after {in_s} s, in sets {named}, {victims[0].swarm.newcomers.counts}")
            assert in_s is not None
            assert in_s <= IN_S
            assert sum(named) > PLACES, "they took all places, and more"
            for node in victims:
                ledger, newcomers = node.swarm.ledger, node.swarm.newcomers
                assert not ledger.is_closed
                assert newcomers.counts[0] <= max(PLACES, max(map(len, final_sets(node))) + 1)
                here = crowd & set(ledger.vector())
                print(len(here), ledger.disk_bytes)
                # What one takes from the flood comes to the others through it, too: mostly the same.
                assert len(here) <= 1.5 * rate * (FLOOD_S / 60 + 1)
                assert not crowd & set(ledger.wanted()) - {*newcomers.accepted._named, *newcomers._held}
            done = w.newest()
            await w.until(lambda: newcomer.worker.final >= done, 120.0)
            # A late joiner gets the feeds of those that rest, because final sets name their work.
            late, counts = w.start(5), lambda node: node.driver.finality.tally.counts
            late_s = await w.until(lambda: late.peer in counts(victims[0]), 120.0)
            print(f"the late joiner was in after {late_s} s")
            await w.until(lambda: late.peer in counts(late), 120.0)
            assert {peer: counts(late).get(peer) for peer in crowd} == {
                peer: counts(victims[0]).get(peer) for peer in crowd
            }
            w.check_agreement()

    run_virtual(story())
