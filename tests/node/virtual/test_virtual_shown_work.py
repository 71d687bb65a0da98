"""Whole nodes of a guarded run: identities that send noise of legal size in every final set never decide."""

import asyncio
import random

import pytest
from msgspec.structs import replace

from atoll.node.daemon.certificates import certificate
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round, digest
from atoll.protocols.ledger.coverage import payload_size
from atoll.protocols.ledger.records import AuditedContribution, encode_entry, sign_entry
from atoll.protocols.run.sections.audits import AuditSpec
from tests.node.virtual.test_virtual_audits import AuditedWorker

ROUND_S = 10.0
PROBATION = 8
CROWD = 6
SETS = 20
PLACES = 4
IN_S = 60.0


def guarded(voters, **settings):
    audit = AuditSpec(each=3, voters=True, **settings) if voters else AuditSpec(each=3)
    return lambda spec: replace(spec, audit=audit, pace=replace(spec.pace, probation=PROBATION, probation_256=64))


class Crowd:
    """Made-up identities that write one contribution a round, of random bytes, brought by a member."""

    def __init__(self, w, rng, many=CROWD):
        self.w, self.rng = w, rng
        self.feeds = [(Identity(rng.randbytes(32)), 0, b"") for _ in range(many)]
        self.peers = {author.peer_id for author, _, _ in self.feeds}
        AuditedWorker.idle = frozenset(self.peers)
        self.round = -1

    def write(self):
        number = Round(self.w.newest() + 1)
        if number <= self.round:
            return
        self.round, bringer = number, self.w.nodes[2]
        for at, (author, seq, previous) in enumerate(self.feeds):
            payload = self.rng.randbytes(payload_size(self.w.spec, number, b""))
            blob = bringer.swarm.blobs.store.add_bytes(payload)
            body = AuditedContribution(number, digest(b"base"), blob, 1, 1, 64, 1.0, verdicts=())
            entry = sign_entry(self.w.spec.id, author, seq, previous, body)
            self.feeds[at] = author, seq + 1, entry.id
            for node in self.w.nodes.values():
                node.swarm.replication._on_entry(bringer.peer, encode_entry(entry))

    def most_sets(self):
        counts = self.w.nodes[0].driver.finality.tally.counts
        return max(counts.get(peer, 0) for peer in self.peers)

    def decides(self):
        nodes = [node for node in self.w.nodes.values() if node.driver]
        return any(self.peers & {*node.driver.finality.voters} for node in nodes)


@pytest.mark.parametrize("voters", [True, False])
def test_noise_in_twenty_final_sets_decides_only_where_voters_need_not_show_work(world, voters):
    async def story() -> None:
        async with world(60, 3, worker=AuditedWorker, adjust=guarded(voters)) as w:
            for number in range(3):
                w.start(number, ROUND_S)
            crowd, new_sets = Crowd(w, random.Random(1)), 0
            await w.until(lambda: w.all_final(1))
            while crowd.most_sets() < SETS:
                crowd.write()
                if crowd.decides():
                    assert not voters
                    print(f"noise decides after {crowd.most_sets()} sets")
                    return
                assert not voters or not w.nodes[0].driver.standings.auditor.judgement.gone - crowd.peers
                if crowd.most_sets() > 2 and 3 not in w.nodes:
                    w.start(3, ROUND_S)
                state = w.nodes[0].driver.finality
                if not new_sets and 3 in w.nodes and w.nodes[3].peer in state.voters:
                    new_sets = state.tally.counts[w.nodes[3].peer]
                await asyncio.sleep(1.0)
            assert voters
            judged = w.nodes[0].driver.standings.auditor.judgement
            print(f"without weight: {len(judged.gone & crowd.peers)} of {CROWD}")
            assert judged.gone, "noise falls by verdicts of those that decide"
            assert judged.gone <= crowd.peers
            tally, new = w.nodes[0].driver.finality.tally, w.nodes[3].peer
            print(f"the newcomer decides after {new_sets} sets, noise in {crowd.most_sets()} never")
            assert PROBATION <= new_sets <= 2 * PROBATION
            assert tally.shown == {node.peer for node in w.nodes.values()}, "the newcomer has shown its work, too"
            assert all(peer in w.nodes[0].driver.finality.voters for peer in tally.shown)
            (told,) = w.nodes[0].driver.view().standings.of(next(iter(crowd.peers)))
            assert "once verdicts of voters show enough" in told.why
            assert w.nodes[0].driver.view().standings.of(new)[0].votes_in == 0
            # Who restarts, who comes late and who reads the proof of a round count the same.
            await w.kill(1)
            w.start(1, ROUND_S)
            w.start(4, ROUND_S)
            first = w.nodes[0].driver.finality.last_final
            await w.until(lambda: min(w.nodes[at].worker.final for at in range(5)) >= first + 2)
            states = [node.driver.finality for node in w.nodes.values()]
            same = [state.tally for state in states if state.last_final == states[0].last_final]
            assert len(same) > 1
            assert all(tally == same[0] for tally in same)
            ledger, last = w.nodes[1].swarm.ledger, w.nodes[1].driver.finality.last_final
            proof = certificate.gather(w.spec, last, lambda number: ledger.entries(number=number))
            assert certificate.proven(w.spec, proof).round == last
            w.check_agreement()

    run_virtual(story())


def test_a_final_set_names_no_more_noise_than_the_run_allows(world):
    """Forty identities contribute to each round; a newcomer comes meanwhile, one restarts and one comes late."""

    async def story() -> None:
        async with world(60, 3, worker=AuditedWorker, adjust=guarded(True, newcomers=PLACES)) as w:
            for number in range(3):
                w.start(number, ROUND_S)
            await w.until(lambda: w.all_final(1))
            crowd, came_s, in_s, new = Crowd(w, random.Random(1), many=40), 0.0, None, None
            now, began = w.nodes[0].driver.context.now, w.newest()
            while w.nodes[0].driver.finality.last_final < began + 18:
                crowd.write()
                assert not crowd.decides()
                rows = w.nodes[0].driver.context.log.rows
                sets = {at: {*rows[at].contributors} for at in sorted(rows) if rows[at].final}
                if w.newest() > began + 4 and new is None:
                    new, came_s = w.start(3, ROUND_S), now()
                if new is not None and in_s is None and any(new.peer in names for names in sets.values()):
                    in_s = now() - came_s
                await asyncio.sleep(1.0)
            noise = [len(names & crowd.peers) for names in sets.values()]
            print(f"in after {in_s} s, noise in sets {noise}, seconds {now()}")
            assert in_s is not None
            assert in_s <= IN_S
            assert max(noise) == PLACES  # as many as others, once the newcomer is one of them
            members = {node.peer for node in list(w.nodes.values())[:3]}
            assert all(members <= names for at, names in sets.items() if at > began), "they are never left out"
            await w.kill(1)
            w.start(1, ROUND_S)
            w.start(4, ROUND_S)
            first = w.nodes[0].driver.finality.last_final
            await w.until(lambda: min(w.nodes[at].worker.final for at in range(5)) >= first + 2)
            ledger, last = w.nodes[1].swarm.ledger, w.nodes[1].driver.finality.last_final
            proof = certificate.gather(w.spec, last, lambda number: ledger.entries(number=number))
            assert certificate.proven(w.spec, proof).round == last
            w.check_agreement()

    run_virtual(story())
