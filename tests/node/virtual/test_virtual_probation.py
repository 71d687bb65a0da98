"""Whole nodes: identities that worked for less than the probation decide nothing, stop nothing and weigh less."""

import asyncio

from msgspec.structs import replace

from atoll.node.daemon.certificates import certificate
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.local.worker_messages import FinalizeRequest
from tests.node.virtual.test_virtual_audits import AuditedWorker

ROUND_S = 10.0
PROBATION = 8


def on_probation(spec):
    return replace(spec, pace=replace(spec.pace, probation=PROBATION))


def with_share(spec):
    return replace(spec, pace=replace(spec.pace, probation=PROBATION, probation_256=64))


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


def test_all_nodes_give_newcomers_the_same_share_of_their_weight(world):
    """The worker's state counts the weights. One founder restarts meanwhile, and one newcomer comes later."""

    async def story() -> None:
        async with world(60, 3, worker=AuditedWorker, adjust=with_share) as w:
            for number in range(3):
                w.start(number, ROUND_S)
            w.nodes[0].worker.folds = folds = []
            await w.until(lambda: min(finals(w, 0, 1, 2)) >= 10)
            w.start(3, ROUND_S)
            new = w.nodes[3].peer
            await w.until(lambda: w.nodes[0].driver.finality.tally.counts.get(new, 0) >= 3)
            (told,) = w.nodes[0].driver.view().standings.of(new)
            assert (told.weight_16, "64/256 of its weight" in told.why) == (4, True)
            await w.kill(1)
            w.start(1, ROUND_S)
            w.start(4, ROUND_S)
            await w.until(lambda: w.nodes[0].driver.finality.tally.counts.get(w.nodes[4].peer, 0) >= PROBATION + 2)
            first = w.nodes[0].driver.finality.last_final
            await w.until(lambda: min(finals(w, *range(5))) >= first)
            w.check_agreement()
            await w.check_feeds()
            sets = {ask.round: ask.members for ask in folds if isinstance(ask, FinalizeRequest)}
            for number in range(5):
                peer = w.nodes[number].peer
                found = [m.weight for at in sorted(sets) for m in sets[at] if m.author == peer]
                share = 0 if number < 3 else PROBATION
                assert found == [16] * share + [64] * len(found[share:])

    run_virtual(story())


def bounded(spec):
    outer = replace(spec.outer, aggregate="nnm", by_weight=True, floor_256=64)
    return replace(with_share(spec), outer=outer, reduce=None)


def test_all_nodes_give_newcomers_together_a_quarter_of_the_weight(world):
    """Four newcomers beside two founders; one founder restarts meanwhile."""

    async def story() -> None:
        async with world(60, 2, worker=AuditedWorker, adjust=bounded) as w:
            for number in range(2):
                w.start(number, ROUND_S)
            w.nodes[0].worker.folds = folds = []
            await w.until(lambda: min(finals(w, 0, 1)) >= 10)
            for number in range(2, 6):
                w.start(number, ROUND_S)
            new = [w.nodes[number].peer for number in range(2, 6)]

            def least() -> int:
                return min(w.nodes[0].driver.finality.tally.counts.get(peer, 0) for peer in new)

            await w.until(lambda: least() >= 3)
            await w.kill(1)
            w.start(1, ROUND_S)
            await w.until(lambda: least() >= PROBATION + 2)
            w.check_agreement()
            await w.check_feeds()
            sets = {ask.round: ask.members for ask in folds if isinstance(ask, FinalizeRequest)}
            for at in sorted(sets):
                theirs = [m.weight for m in sets[at] if m.author in new and m.weight < 64]
                others = sum(m.weight for m in sets[at]) - sum(theirs)
                assert sum(theirs) <= others // 3
            assert any([m.weight for m in sets[at] if m.author in new] == [10] * 4 for at in sets)

    run_virtual(story())
