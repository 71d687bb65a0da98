"""Whole nodes of a guarded run that cut their ledgers: with a summary they decide as those with all records."""

import asyncio
import random

import pytest
from msgspec.structs import replace

from atoll.node.daemon.certificates.full_summary import AuditedFullSummary, decode_full
from atoll.node.daemon.consensus import machine
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.ledger.records import Contribution
from atoll.protocols.run.sections.audits import AuditSpec
from atoll.protocols.run.sections.history import HistorySpec
from tests.node.virtual.test_virtual_audits import AuditedWorker, events
from tests.node.virtual.test_virtual_shown_work import Crowd
from tests.node.virtual.test_virtual_summaries import certified, known_final

KEPT, EVERY = 24, 8
"""Rounds that a cut ledger keeps; `history.every`."""
ROUND_S = 10.0
NOISY = 30
"""Made-up identities send noise up to this round."""


@pytest.fixture(autouse=True)
def window(monkeypatch):
    """Forks are looked at as far back as records are kept, as in the product."""
    monkeypatch.setattr(machine, "DECIDED_KEPT", KEPT)


def guarded(spec):
    """Audits look back at fewer rounds than a ledger keeps, as in the product."""
    audit = AuditSpec(each=3, voters=True, memory=12)
    pace = replace(spec.pace, probation=8, probation_256=64)
    return replace(spec, audit=audit, history=HistorySpec(every=EVERY), pace=pace)


def ledger_bytes(node):
    rows = node.swarm.ledger._db.rows("SELECT COUNT(*), SUM(LENGTH(data)) FROM entries")
    return rows[0][0], rows[0][1] + len(node.swarm.ledger.history.summary or b"")


def check_same(nodes, first):
    """All decide alike from round `first` on, and count alike where they are as far."""
    states = [node.driver.finality for node in nodes]
    newest = min(state.last_final for state in states)
    for at in range(first, newest + 1):
        assert len({state.decided[at] for state in states}) == 1, at
    same = [node for node in nodes if node.driver.finality.last_final == states[0].last_final]
    judged = [node.driver.standings.auditor.judgement for node in same]
    assert all(node.driver.finality.tally == states[0].tally for node in same)
    assert all(one == judged[0] for one in judged), "weights, and all that they follow from"
    return len(same)


def test_a_guarded_run_forgets_old_rounds_and_none_of_its_voters(world):
    async def story() -> None:
        async with world(400, 3, worker=AuditedWorker, adjust=guarded) as w:
            w.start(0, ROUND_S)
            for number in (1, 2):
                w.start(number, ROUND_S, recent=(KEPT, EVERY))
            crowd = Crowd(w, random.Random(1))
            await w.until(lambda: known_final(w) >= 1)
            while known_final(w) < NOISY:
                crowd.write()
                if 3 not in w.nodes and known_final(w) >= 10:
                    w.start(3, ROUND_S, recent=(KEPT, EVERY))  # it shows its work on both sides of round 16
                assert not crowd.decides()
                await asyncio.sleep(1.0)
            # The first cut is behind round 15: what node 1 begins with has verdicts on those on probation.
            await w.until(lambda: all(w.nodes[at].driver.history.last_gone == 15 for at in (1, 2)))
            full = decode_full(w.nodes[1].swarm.ledger.history.summary)
            assert isinstance(full, AuditedFullSummary)
            assert full.summary.verdicts[0].found
            assert not w.nodes[1].swarm.ledger.entries(number=5, kind=Contribution)
            await w.kill(1)
            w.start(1, ROUND_S)
            await w.until(lambda: w.nodes[1].driver is not None and w.nodes[1].driver.finality.live)
            assert check_same([w.nodes[0], w.nodes[1]], 16)
            # Nobody with all records is here when a newcomer begins. It decides, and certifies what all others do.
            await w.until(lambda: known_final(w) >= 52)
            await w.kill(0)
            late = w.start(4, ROUND_S, recent=(KEPT, EVERY))
            await w.until(lambda: late.driver is not None and late.driver.history.last_gone >= 15, 500)
            w.start(0, ROUND_S)
            await w.until(lambda: late.peer in w.nodes[1].driver.finality.voters, 500)
            first = w.nodes[1].driver.finality.last_final
            await w.until(lambda: known_final(w) >= first + EVERY + 1)
            nodes = list(w.nodes.values())
            assert check_same(nodes, first) > 1
            assert w.nodes[0].driver.finality.tally.shown == {node.peer for node in nodes}
            assert max(certified(late)) > first
            assert certified(late).items() <= certified(w.nodes[0]).items()
            assert not any(events(node, "other_summary") for node in nodes)
            (all_count, all_bytes), (count, recent_bytes) = map(ledger_bytes, nodes[:2])
            print(f"round {known_final(w)}: {all_count} entries, {all_bytes} bytes; cut: {count}, {recent_bytes}")
            assert recent_bytes < all_bytes / 2
            w.check_agreement()
            await w.check_feeds()

    run_virtual(story())
