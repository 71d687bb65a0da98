"""Whole nodes: identities that have worked for less than the probation decide nothing, and stop nothing."""

import asyncio

from msgspec.structs import replace

from atoll.node.daemon.consensus import certificate
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.run.run_spec import SPEC_VERSION

ROUND_S = 10.0
PROBATION = 8


def on_probation(spec):
    return replace(spec, version=SPEC_VERSION, pace=replace(spec.pace, probation=PROBATION))


def finals(w, *numbers):
    return [w.nodes[number].worker.final for number in numbers]


def test_a_crowd_on_probation_counts_decides_nothing_and_stops_nothing(world):
    async def story() -> None:
        async with world(80, 3, adjust=on_probation) as w:
            for number in range(3):
                w.start(number, ROUND_S)
            await w.until(lambda: min(finals(w, 0, 1, 2)) >= 20)
            for number in range(3, 8):
                w.start(number, ROUND_S)
            crowd = {w.nodes[number].peer for number in range(3, 8)}
            founders = [w.nodes[number] for number in range(3)]

            def counts():
                tally = founders[0].driver.finality.tally.counts
                return [tally.get(peer, 0) for peer in crowd]

            while max(counts()) < PROBATION - 2:
                assert not any(crowd & set(node.driver.finality.voters) for node in founders)
                await asyncio.sleep(1)
            assert min(counts()) > 0, "their work counts"
            for number in range(3, 8):
                await w.kill(number)
            before = max(finals(w, 0, 1, 2))
            took_s = await w.until(lambda: min(finals(w, 0, 1, 2)) > before + 1)
            assert took_s < w.spec.pace.lease_s + 2 * ROUND_S
            assert all(len(node.driver.finality.chain) == 1 for node in founders), "no epoch was needed"
            # The proof of a round counts the same.
            ledger, last = founders[1].swarm.ledger, founders[1].driver.finality.last_final
            proof = certificate.gather(w.spec, last, lambda number: ledger.entries(number=number))
            proven = certificate.proven(w.spec, proof)
            assert proven.round == last
            w.check_agreement()

    run_virtual(story())


def test_who_stays_decides_after_its_probation_and_after_a_restart_all_count_the_same(world):
    async def story() -> None:
        async with world(80, 2, adjust=on_probation) as w:
            for number in range(2):
                w.start(number, ROUND_S)
            await w.until(lambda: min(finals(w, 0, 1)) >= 10)
            w.start(2, ROUND_S)
            late, told = w.nodes[2].peer, []

            def votes() -> bool:
                told.extend(each.votes_in for each in w.nodes[0].driver.view().standings.of(late))
                return late in w.nodes[0].driver.finality.voters

            await w.until(votes)
            assert w.nodes[0].driver.finality.tally.counts[late] == PROBATION
            assert list(dict.fromkeys(told)) == list(range(PROBATION, -1, -1)), "one less with each set"
            await w.kill(1)
            w.start(1, ROUND_S)
            w.start(3, ROUND_S)
            first = w.nodes[0].driver.finality.last_final
            await w.until(lambda: min(finals(w, *range(4))) >= first + 6)
            states = [w.nodes[number].driver.finality for number in range(4)]
            newest = min(state.last_final for state in states)
            assert len({(tuple(sorted(s.tally.counts.items()))) for s in states if s.last_final == newest}) == 1
            w.check_agreement()

    run_virtual(story())
