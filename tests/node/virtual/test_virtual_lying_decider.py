"""Whole nodes of a guarded run of which one that decides lies in all of its verdicts."""

import asyncio

from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.ledger.records import MAX_EXCESS
from tests.node.virtual.test_virtual_audits import AuditedWorker
from tests.node.virtual.test_virtual_shown_work import PROBATION, ROUND_S, guarded

MEMBERS, LIAR, NOISE = 4, 1, 4
ROUNDS = 2 * PROBATION + 6


def test_a_decider_that_lies_takes_nobodys_weight_and_lets_no_noise_decide(world):
    """It works, finds work in noise alone, and is one of the first that decide."""

    async def story() -> None:
        async with world(60, MEMBERS + 1, worker=AuditedWorker, adjust=guarded(True)) as w:
            for number in range(MEMBERS + 1):
                w.start(number, ROUND_S)
            noise = w.nodes[NOISE].peer
            AuditedWorker.idle = frozenset({noise})
            await w.until(lambda: w.all_final(0))
            w.nodes[LIAR].worker.lie = lambda author: MAX_EXCESS if author == noise else -MAX_EXCESS
            gone = set()
            while w.nodes[0].driver.finality.last_final < ROUNDS:
                for node in w.nodes.values():
                    gone |= node.driver.standings.auditor.judgement.gone
                    assert noise not in node.driver.finality.voters
                await asyncio.sleep(2.0)
            shown = w.nodes[0].driver.finality.tally.shown
            print(f"without weight: {len(gone)}, deciders: {len(shown)}")
            assert gone == {noise}
            assert shown == {w.nodes[number].peer for number in range(MEMBERS)}
            w.check_agreement()

    run_virtual(story())
