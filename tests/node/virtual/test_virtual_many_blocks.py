"""Whole nodes of a guarded run: made-up identities of many address blocks, each with work of legal size."""

import asyncio
import random

import pytest

from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round, digest
from atoll.protocols.ledger.coverage import payload_size
from atoll.protocols.ledger.records import AuditedContribution, encode_entry, sign_entry
from tests.node.virtual.test_virtual_audits import AuditedWorker
from tests.node.virtual.test_virtual_shown_work import ROUND_S, guarded

BLOCKS = 64
PLACES = 16
A_SECOND = 160
"""Identities that come in a second."""
AT_WORK = 160
"""Of them so many contribute to all rounds from then on."""
IN_S = 60.0


class Blocks:
    """Made-up identities, all of which contribute, and some to every round; neighbours of 64 blocks bring them.

    The first ones are these neighbours: so each address has a line of its own, and one of those that it brings.
    """

    def __init__(self, w, made_up, victims, monkeypatch):
        self.w, self.rng, self.victims = w, random.Random(1), victims
        self.authors = [Identity(self.rng.randbytes(32)) for _ in range(made_up)]
        self.peers = {author.peer_id for author in self.authors}
        self.neighbours = [author.peer_id for author in self.authors[:BLOCKS]]
        AuditedWorker.idle, self.sent = frozenset(self.peers), 0
        self.round, self.at_work = Round(-1), []
        maddrs = {peer: f"/ip4/10.{at}.9.1/tcp/1" for at, peer in enumerate(self.neighbours)}
        for node in victims:
            newcomers, known = node.swarm.newcomers, node.swarm.newcomers._maddr_of
            monkeypatch.setattr(newcomers, "_maddr_of", lambda peer, b=known: maddrs.get(peer) or b(peer))

    def send(self, many):
        """Contribute once for so many more of them, and for those at work to a new round."""
        number = Round(self.w.newest() + 1)
        if number > self.round:
            self.round, self.at_work = number, [self.write(number, *feed) for feed in self.at_work]
        for author in self.authors[self.sent : self.sent + many]:
            feed = self.write(number, self.sent % BLOCKS, author, 0, b"")
            if self.sent < AT_WORK:
                self.at_work.append(feed)
            self.sent += 1

    def write(self, number, at, author, seq, previous):
        """One contribution, as neighbour `at` brings it to all. Returns what the next one needs."""
        store = self.w.nodes[2].swarm.blobs.store
        payload = store.add_bytes(self.rng.randbytes(payload_size(self.w.spec, number, b"")))
        body = AuditedContribution(number, digest(b"base"), payload, 1, 1, 64, 1.0, verdicts=())
        entry = sign_entry(self.w.spec.id, author, seq, previous, body)
        for node in self.victims:
            node.swarm.replication._on_entry(self.neighbours[at], encode_entry(entry))
        return at, author, seq + 1, entry.id


@pytest.mark.parametrize(
    ("made_up", "most_s"),
    [
        # It comes 9 s after the flood: each block of that is as new as its own, and has its turn.
        (3_000, IN_S),
        pytest.param(
            10_000,
            IN_S,
            marks=pytest.mark.slow(slice="test_a_newcomer_gets_into_a_run_that_many_blocks_flood[3000-60.0]"),
        ),
    ],
)
def test_a_newcomer_gets_into_a_run_that_many_blocks_flood(world, monkeypatch, made_up, most_s):
    async def story() -> None:
        async with world(60, 3, worker=AuditedWorker, adjust=guarded(True, newcomers=PLACES)) as w:
            for number in range(3):
                w.start(number, ROUND_S)
            await w.until(lambda: w.all_final(1))
            victims = list(w.nodes.values())
            flood, began, now = Blocks(w, made_up, victims, monkeypatch), w.newest(), w.nodes[0].driver.context.now
            bytes_before = victims[0].swarm.ledger.disk_bytes
            new, came_s, in_s = None, 0.0, None
            while in_s is None or flood.sent < made_up:
                flood.send(A_SECOND)
                await asyncio.sleep(1.0)
                rows = victims[0].driver.context.log.rows
                sets = {at: {*rows[at].contributors} for at in sorted(rows) if rows[at].final}
                if new is None and flood.sent > made_up // 2:
                    new, came_s = w.start(3, ROUND_S), now()
                if new is not None and in_s is None and any(new.peer in names for names in sets.values()):
                    in_s = now() - came_s
                assert in_s is not None or new is None or now() - came_s < 4 * IN_S
                for node in victims:
                    assert not flood.peers & {*node.driver.finality.voters}
                    assert node.driver.standings.auditor.judgement.gone <= flood.peers
            noise = [len(names & flood.peers) for at, names in sets.items() if at > began]
            ledger = victims[0].swarm.ledger
            print(
                f"{flood.sent} made up, in after {in_s} s, noise in sets {noise}, {len(ledger.vector())} authors"
            )
            print(f"counts {victims[0].swarm.newcomers.counts}, {bytes_before} and {ledger.disk_bytes} bytes")
            assert in_s <= most_s
            assert max(noise) <= PLACES
            assert sum(noise) >= PLACES, "it does work"
            members = {node.peer for node in victims}
            assert all(members <= names for at, names in sets.items() if at > began), "they are never left out"
            w.check_agreement()

    run_virtual(story())
