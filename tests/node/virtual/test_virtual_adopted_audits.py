"""Whole nodes whose audits an evaluator makes: trainers adopt what it finds, check some of it, and drop a liar."""

from itertools import pairwise

import msgspec
import torch

from atoll.node.config.roles import Work
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.ledger.audit_claims import AuditCall
from atoll.protocols.ledger.records import MAX_EXCESS, AuditedContribution
from tests.node.virtual.real_worker import RealWorker, Seen
from tests.node.virtual.test_virtual_audits import (
    IDLE,
    NODES,
    AuditedWorker,
    audited,
    events,
    mark_idle,
    real,
    unweighed,
)

ROUNDS, EACH = 30, 3
FEW = 18
"""Enough to trust an evaluator, and for some rounds after it lies or is gone."""
EVALUATES = Work(trains=False, evaluates=True)


def by_muon(spec):
    spec = audited(spec)
    inner = msgspec.structs.replace(spec.inner, optimizer="muon")
    return msgspec.structs.replace(spec, inner=inner, audit=msgspec.structs.replace(spec.audit, each=EACH))


def trainers(w):
    return [w.nodes[number] for number in range(NODES)]


def auditor(node):
    return node.driver.standings.auditor


def begun(w):
    AuditedWorker.idle = frozenset()
    for number in range(NODES):
        w.start(number)
    return w.start(NODES, work=EVALUATES)


def trusted(w):
    return all(node.driver and auditor(node).adopted >= 3 for node in trainers(w))


def verdicts_of(w, node):
    feed = [entry.body for _, entry in w.nodes[0].swarm.ledger.since(0, 1 << 20) if entry.author == node.peer]
    return [verdict for body in feed if isinstance(body, AuditedContribution) for verdict in body.verdicts]


def test_trainers_measure_the_checked_share_and_sign_what_they_would_have_found(world):
    async def story() -> None:
        async with world(ROUNDS, NODES, worker=AuditedWorker, adjust=by_muon) as w:
            evaluator = begun(w)
            await w.until(lambda: trusted(w))
            before = {node.peer: (auditor(node).made, auditor(node).adopted) for node in trainers(w)}
            await w.until(lambda: all(node.worker.final >= ROUNDS - 1 for node in trainers(w)))
            w.check_agreement()
            made = sum(auditor(node).made - before[node.peer][0] for node in trainers(w))
            adopted = sum(auditor(node).adopted - before[node.peer][1] for node in trainers(w))
            assert 0.15 < made / (made + adopted) < 0.40, (
                made,
                adopted,
                [dict(auditor(n).adoption.liars) for n in trainers(w)],
            )
            assert made + adopted > 100, (made, adopted)
            for node in trainers(w):
                assert node.worker.measured == auditor(node).made
                (told,) = node.driver.view().standings.of(node.peer)
                assert (told.audits_made, told.audits_adopted) == (auditor(node).made, auditor(node).adopted)
                assert not auditor(node).adoption.liars
                found = verdicts_of(w, node)
                assert len({each.contribution for each in found}) > 40, len(found)
                assert all(each.excess == node.worker.truth[each.contribution] for each in found)
                assert unweighed(node) == []
            (served,) = evaluator.driver.view().standings.of(evaluator.peer)
            assert served.audits_made == evaluator.worker.measured > 200

    run_virtual(story())


def test_an_evaluator_that_begins_to_lie_is_dropped_and_takes_nobodys_weight(world):
    """It takes the weight of all that work, and gives one that is idle all of it."""

    async def story() -> None:
        async with world(FEW, NODES, worker=AuditedWorker, adjust=by_muon) as w:
            evaluator = begun(w)
            idle = mark_idle(w)
            await w.until(lambda: trusted(w))
            evaluator.worker.lie = lambda author: MAX_EXCESS if author == idle else -MAX_EXCESS
            await w.until(lambda: all(auditor(node).adoption.liars for node in trainers(w)))
            dropped = {node.peer: auditor(node).adopted for node in trainers(w)}
            await w.until(lambda: all(node.worker.final >= FEW - 1 for node in trainers(w)))
            w.check_agreement()
            for node in trainers(w):
                assert list(auditor(node).adoption.liars) == [evaluator.peer]
                assert auditor(node).adopted == dropped[node.peer], "never again"
                assert all(each.excess == node.worker.truth[each.contribution] for each in verdicts_of(w, node))
                assert all(peers in ([], [idle]) for peers in unweighed(node))
                assert unweighed(node)[-1] == [idle]

    run_virtual(story())


def test_an_evaluator_that_flatters_is_dropped_at_the_first_check(world):
    async def story() -> None:
        async with world(FEW, NODES, worker=AuditedWorker, adjust=by_muon) as w:
            evaluator = begun(w)
            await w.until(lambda: trusted(w))
            evaluator.worker.lie = lambda author: MAX_EXCESS
            await w.until(lambda: all(auditor(node).adoption.liars for node in trainers(w)))
            dropped = {node.peer: auditor(node).adopted for node in trainers(w)}
            await w.until(lambda: all(node.worker.final >= FEW - 1 for node in trainers(w)))
            for node in trainers(w):
                assert auditor(node).adopted == dropped[node.peer]
                truth = node.worker.truth
                said = {each.contribution: each.excess for each in verdicts_of(w, node)}
                wrong = [entry for entry, excess in said.items() if excess != truth[entry]]
                assert len(wrong) <= 12, "three on average before a check"
                assert unweighed(node) == []

    run_virtual(story())


def test_an_evaluator_that_vanishes_costs_no_round_anything(world):
    async def story() -> None:
        async with world(FEW, NODES, worker=AuditedWorker, adjust=by_muon) as w:
            begun(w)
            await w.until(lambda: trusted(w))
            await w.kill(NODES)
            gone_at = w.newest()
            await w.until(lambda: all(node.worker.final >= gone_at + 2 for node in trainers(w)))
            adopted = [auditor(node).adopted for node in trainers(w)]
            await w.until(lambda: all(node.worker.final >= FEW - 1 for node in trainers(w)))
            w.check_agreement()
            assert [auditor(node).adopted for node in trainers(w)] == adopted
            for node in trainers(w):
                audits = [row for row in events(node, "audited") if row["round"] < FEW - 2]
                drawn = {row["round"] for row in audits}
                assert drawn >= set(range(gone_at - 1, FEW - 2)), "each round is audited"
                assert sum(row["round"] >= gone_at - 1 for row in audits) == EACH * (FEW - 2 - gone_at + 1)
                times = [row["time"] for row in events(node, "closed")]
                assert max(after - before for before, after in list(pairwise(times))[2:]) < 12.5

    run_virtual(story())


def test_where_trainers_divide_by_gradients_they_call_nobody(world):
    async def story() -> None:
        async with world(8, NODES, worker=AuditedWorker, adjust=audited) as w:
            evaluator = begun(w)
            await w.until(lambda: all(node.worker.final >= 7 for node in trainers(w)))
            assert evaluator.worker.measured == 0
            assert not w.nodes[0].swarm.live(AuditCall)
            assert w.nodes[IDLE].driver.standings.auditor.made > 0

    run_virtual(story())


def real_by_muon(spec):
    spec = real(spec)
    inner = msgspec.structs.replace(spec.inner, optimizer="muon")
    return msgspec.structs.replace(spec, inner=inner, audit=msgspec.structs.replace(spec.audit, each=2))


def test_a_real_worker_that_does_not_train_finds_what_trainers_find(world):
    torch.set_num_threads(1)
    seen = Seen({}, {}, {}, {})

    async def story() -> None:
        async with world(6, 3, worker=lambda *args: RealWorker(*args, seen=seen), adjust=real_by_muon) as w:
            for number in range(3):
                w.start(number)
            evaluator = w.start(3, work=EVALUATES)
            start = evaluator.worker._start
            evaluator.worker._start = msgspec.structs.replace(start, trains=False)
            await w.until(lambda: all(w.nodes[number].worker.final >= 5 for number in range(3)))
            w.check_agreement()
            agreed = [auditor(w.nodes[number]).adoption._agreed for number in range(3)]
            assert all(found.get(evaluator.peer, 0) >= 3 for found in agreed), agreed
            assert not any(auditor(w.nodes[number]).adoption.liars for number in range(3))
            assert evaluator.driver.standings.for_others.made >= 9

    run_virtual(story())
