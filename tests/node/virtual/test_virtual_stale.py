"""Whole nodes of which half take whole rounds four times as slowly: their work counts in later rounds, once."""

from itertools import pairwise

from msgspec.structs import replace

from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.ledger.records import Contribution, age_of
from atoll.protocols.local.worker_messages import FinalizeRequest
from atoll.protocols.run.sections.variants.staleness import StaleSpec
from tests.node.virtual.test_virtual_audits import AuditedWorker

ROUND_S, SLOWER = 10.0, 4
FAST, SLOW = (0, 1), (2, 3)
LATE = 4


def stale(weights, most=8):
    def adjusted(spec):
        pace = replace(spec.pace, quorum_256=64, grace_256=32, stale=StaleSpec(most=most, weights=weights))
        spec = replace(spec, pace=pace)
        spec.check()
        return spec

    return adjusted


def ran(world, weights, rounds=24):
    """The weights of each node's work by round and age; node 1 is killed and returns, a slow one comes late."""

    async def story():
        async with world(80, 4, worker=AuditedWorker, adjust=stale(weights)) as w:
            for number in FAST:
                w.start(number, ROUND_S)
            for number in SLOW:
                w.start(number, SLOWER * ROUND_S)
            w.nodes[0].worker.folds = folds = []
            final = lambda number: w.nodes[number].worker.final  # noqa: E731
            await w.until(lambda: final(0) >= 8)
            await w.kill(1)
            w.start(1, ROUND_S)
            w.start(LATE, SLOWER * ROUND_S)
            took_s = await w.until(lambda: final(0) >= rounds)
            await w.until(lambda: min(map(final, w.nodes)) >= rounds)
            w.check_agreement()
            await w.check_feeds()
            ages = {}
            for _, entry in w.nodes[0].swarm.ledger.since(0, 1 << 20):
                if isinstance(entry.body, Contribution):
                    ages[entry.author, entry.body.round] = age_of(entry.body)
            sets = {ask.round: ask.members for ask in folds if isinstance(ask, FinalizeRequest)}
            found = {
                number: [
                    (at, ages[m.author, at], m.weight)
                    for at in sorted(sets)
                    for m in sets[at]
                    if m.author == w.nodes[number].peer
                ]
                for number in w.nodes
            }
            assert {at for at in sets if at <= rounds} == set(range(rounds + 1))
            return found, ages, {n: w.nodes[n].peer for n in w.nodes}, took_s / (rounds - 8)

    return run_virtual(story())


def test_fedbuff_weighs_by_age_and_slow_work_is_in_the_final_sets_once(world):
    found, ages, peers, round_s = ran(world, "fedbuff")
    print(found, round_s)
    assert round_s <= 1.5 * ROUND_S, "the fast do not wait for the slow"
    for number in FAST:
        assert {age for _, age, _ in found[number]} == {0}
    for number in (*SLOW, LATE):
        old = [(age, weight) for _, age, weight in found[number] if age]
        assert len(old) >= 2
        assert all(weight == {1: 45, 2: 36, 3: 32, 4: 28, 5: 26}[age] for age, weight in old)
        said = sorted(at for who, at in ages if who == peers[number])
        # Work of rounds that overlap would count twice.
        spans = [(at - ages[peers[number], at], at) for at in said]
        assert all(before[1] < after[0] for before, after in pairwise(spans))
        assert len(found[number]) >= 0.75 * len([at for at in said if at <= max(at for at, _, _ in found[0])])


def test_fedfix_weighs_by_how_seldom_a_member_is_in_time(world):
    found, _, _, _ = ran(world, "fedfix", rounds=32)
    print(found)
    fast = [weight for at, _, weight in found[0] if at >= 20]
    slow = [weight for at, _, weight in found[2] if at >= 20]
    assert set(fast) <= {7, 8}
    assert min(slow) >= 20
