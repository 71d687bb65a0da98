"""Whole nodes that cut their ledgers: they stay small, decide as all others, and lose nobody with the records."""

import shutil

import pytest
from msgspec.structs import replace

from atoll.node.daemon.consensus import machine
from atoll.p2p.ledger.store import LEDGER_FILE
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.ledger.records import Ack
from tests.node.virtual.test_virtual_audits import AuditedWorker

RECENT = (24, 8)
"""Rounds that a cut ledger keeps, and rounds between two cuts."""
ROUND_S = 10.0


@pytest.fixture(autouse=True)
def window(monkeypatch):
    """Forks are looked at as far back as records are kept, as in the product."""
    monkeypatch.setattr(machine, "DECIDED_KEPT", RECENT[0])


def on_probation(spec):
    return replace(spec, pace=replace(spec.pace, probation=30, probation_256=64))


def finals(w, *numbers):
    return min(w.nodes[number].worker.final for number in numbers)


def gone(w, *numbers):
    nodes = [w.nodes[number] for number in numbers]
    return min(node.driver.history.last_gone if node.driver is not None else -1 for node in nodes)


def pages(w, number):
    return w.nodes[number].swarm.ledger._db.rows("PRAGMA page_count")[0][0]


def test_a_cut_ledger_stays_small_and_its_node_decides_as_the_others(world):
    async def story() -> None:
        async with world(400, 3, worker=AuditedWorker, adjust=on_probation) as w:
            w.start(0, ROUND_S)
            w.start(1, ROUND_S, recent=RECENT)
            w.start(2, ROUND_S, recent=RECENT)
            await w.until(lambda: finals(w, 0, 1, 2) >= 60)
            before = pages(w, 0), pages(w, 1)
            kept = [w.nodes[number].driver.view().records_from for number in (0, 1)]
            assert kept[0] == 0
            assert 60 - RECENT[0] - 2 * RECENT[1] < kept[1] <= 60
            records = [entry.body for _, entry in w.nodes[1].swarm.ledger.since(0, 1 << 20)]
            newest = [body.round for body in records if isinstance(body, Ack)]
            assert min(newest) == kept[1]
            # A newcomer replays all that node 0 has. A start replays the summary and what is here: with the rounds
            # that are gone the newcomer is on probation still, without them it would not be.
            late = w.start(3, ROUND_S)
            await w.until(lambda: w.nodes[1].driver.finality.tally.counts.get(late.peer, 0) >= 20)
            await w.kill(1)
            w.start(1, ROUND_S)
            await w.until(lambda: late.peer in w.nodes[1].driver.finality.voters)
            await w.until(lambda: finals(w, 0, 1, 2, 3) >= 140)
            after = pages(w, 0), pages(w, 1)
            assert after[0] > 1.8 * before[0]
            assert after[1] < 1.3 * before[1], (before, after)
            states = [w.nodes[number].driver.finality for number in range(4)]
            newest = min(state.last_final for state in states)
            counts = {tuple(sorted(s.tally.counts.items())) for s in states if s.last_final == newest}
            assert len(counts) == 1
            assert states[1].tally.rounds == states[1].deciding, "rounds that are gone count"
            w.check_agreement()
            await w.check_feeds()

    run_virtual(story())


def test_a_newcomer_is_told_which_peers_it_needs_and_gets_in_once_one_is_there(world):
    async def story() -> None:
        async with world(400, 3) as w:
            w.start(0, ROUND_S)
            for number in (1, 2):
                w.start(number, ROUND_S, recent=RECENT)
            await w.until(lambda: gone(w, 1, 2) > 0)
            await w.kill(0)
            late = w.start(3, ROUND_S)
            await w.until(
                lambda: late.driver is not None and "keeps recent records only" in late.driver.round.syncing, 200
            )
            first = w.nodes[1].driver.finality.last_final
            await w.until(lambda: finals(w, 1, 2) >= first + 6)
            assert (late.worker.trained, late.swarm.ledger.vector().get(late.peer, 0)) == ([], 0)
            w.start(0, ROUND_S)
            await w.until(lambda: bool(late.worker.trained) and late.worker.final >= first)
            assert late.driver.round.syncing == ""
            await w.until(lambda: finals(w, 0, 1, 2, 3) >= first + 12)
            w.check_agreement()

    run_virtual(story())


def test_a_home_from_an_old_backup_signs_no_second_history_while_its_peers_lack_what_it_needs(world):
    async def story() -> None:
        async with world(400, 3) as w:
            w.start(0, ROUND_S)
            for number in (1, 2, 3):
                w.start(number, ROUND_S, recent=RECENT)
            await w.until(lambda: finals(w, 0, 1, 2, 3) >= 10)
            node = w.nodes[3]
            await w.kill(3)
            shutil.copytree(node.home, w.root / "backup")
            w.start(3, ROUND_S)
            await w.until(lambda: gone(w, 1, 2) > 30)
            await w.kill(3)
            await w.kill(0)
            for file in node.home.glob(f"{LEDGER_FILE}*"):
                file.unlink()
            for file in (w.root / "backup").glob(f"{LEDGER_FILE}*"):
                shutil.copy(file, node.home)
            w.start(3, ROUND_S)
            await w.until(lambda: node.swarm is not None and node.swarm.replication.lacks_own_entries)
            own = node.swarm.ledger.vector()[node.peer]
            first = w.nodes[1].driver.finality.last_final
            await w.until(lambda: finals(w, 1, 2) >= first + 6)
            assert node.swarm.ledger.vector()[node.peer] == own, "it wrote nothing"
            w.start(0, ROUND_S)
            await w.until(lambda: finals(w, 0, 1, 2, 3) >= first + 12)
            assert not any(w.nodes[n].swarm.ledger.equivocators() for n in range(4))
            w.check_agreement()

    run_virtual(story())
