"""Whole nodes audit each other: verdicts travel in contributions, and all nodes give all contributions one weight.

The fake worker's verdicts are what an audit finds, with noise; its state counts the weights. The last test has
real workers, whose audits are real.
"""

import json
import random

import msgspec
import torch

from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.identity import Identity
from atoll.protocols.ids import digest
from atoll.protocols.ledger.entry_rules import is_lawful
from atoll.protocols.ledger.records import MAX_EXCESS, AuditedContribution, Contribution, sign_entry
from atoll.protocols.local.worker_messages import (
    AuditReply,
    AuditRequest,
    CheckRequest,
    FinalizeRequest,
    FoldRequest,
)
from atoll.protocols.run.run_spec import Stage
from atoll.protocols.run.sections.audits import AuditSpec
from tests.node.virtual.conftest import FakeWorker
from tests.node.virtual.real_worker import RealWorker, Seen

NODES, IDLE = 5, 4


class AuditedWorker(FakeWorker):
    """Equal states mean equal sets with equal weights."""

    idle: frozenset[str] = frozenset()
    folds = None
    """All folds of a node that some test looks at."""
    measured = 0
    """Audits with forward passes."""
    lie = None
    """What it finds instead, by the audited author; None: what there is."""

    def __init__(self, *args):
        super().__init__(*args)
        self.truth = {}
        """What each audit finds that this node's daemon asked for."""

    async def _answer(self, ask):
        match ask:
            case AuditRequest(number, _, seed, audited, others, sent, before, measures):
                assert {audited.entry, *(other.entry for other in others)} <= {each.entry for each in sent}
                assert before <= number
                assert audited.author != self.me
                assert audited.entry not in {other.entry for other in others}
                luck = random.Random(seed)
                found = 0 if audited.author in self.idle else round(16 * luck.gauss(4, 1))
                self.truth[audited.entry] = max(-MAX_EXCESS, min(MAX_EXCESS, found))
                self.measured += measures
                said = self.truth[audited.entry] if self.lie is None else self.lie(audited.author)
                return AuditReply(said if measures else 0, 0.1, self.final)
            case FoldRequest() | CheckRequest() | FinalizeRequest():
                weighed = (
                    msgspec.structs.replace(each, entry=digest(each.entry, bytes([each.weight])))
                    for each in ask.members
                )
                if self.folds is not None:
                    self.folds.append(ask)
                ask = msgspec.structs.replace(ask, members=tuple(weighed))
        return await super()._answer(ask)


def audited(spec):
    return msgspec.structs.replace(spec, audit=AuditSpec())


def events(node, name):
    rows = map(json.loads, (node.home / "events.jsonl").read_text().splitlines())
    return [row for row in rows if row["event"] == name]


def unweighed(node):
    return [row["peers"] for row in events(node, "unweighed")]


def mark_idle(w):
    AuditedWorker.idle = frozenset({w.nodes[IDLE].peer})
    return w.nodes[IDLE].peer


def test_all_nodes_take_the_weight_of_who_does_nothing(world):
    async def story() -> None:
        async with world(14, NODES, worker=AuditedWorker, adjust=audited) as w:
            for number in range(NODES):
                w.start(number)
            idle = mark_idle(w)
            w.nodes[0].worker.folds = folds = []
            await w.until(w.all_final)
            w.check_agreement()
            await w.check_feeds()
            assert all(unweighed(node)[0] == [idle] for node in w.nodes.values())
            finals = {ask.round: ask.members for ask in folds if isinstance(ask, FinalizeRequest)}
            ours = {number: m.weight for number, members in finals.items() for m in members if m.author == idle}
            assert (ours[0], ours[13]) == (64, 0)
            for node in w.nodes.values():
                standings, others = node.driver.view().standings, {n.peer for n in w.nodes.values()} - {idle}
                (told,) = standings.diminished({*others, idle})
                assert (told.peer, told.weight_16) == (idle, 0)
                assert told.why.startswith("no weight: ")
                assert told.shown < 3 < 8 < told.usual
                assert bool(standings.trouble()) == (node.peer == idle)
            assert all(m.weight == 64 for members in finals.values() for m in members if m.author != idle)

    run_virtual(story())


def test_who_comes_late_or_comes_back_gives_the_same_weights(world):
    """From the ledger's final sets alone: a snapshot says nothing of verdicts."""

    async def story() -> None:
        async with world(24, NODES, worker=AuditedWorker, adjust=audited, min_members=NODES) as w:
            for number in range(NODES):
                w.start(number)
            idle = mark_idle(w)
            await w.until(lambda: w.newest() >= 13)
            await w.kill(1)
            w.start(NODES)
            await w.until(lambda: w.newest() >= 18)
            w.start(1)
            await w.until(w.all_final)
            w.check_agreement()
            assert len({node.worker.state for node in w.nodes.values()}) == 1
            late = w.nodes[NODES]
            assert unweighed(late)[0] == [idle]
            assert len(late.worker.trained) >= 5
            assert all(peers in ([], [idle]) for node in w.nodes.values() for peers in unweighed(node))

    run_virtual(story())


def test_lost_messages_and_overlap_change_no_weight(world):
    async def story() -> None:
        options = {"worker": AuditedWorker, "adjust": audited, "loss": 0.1, "overlap_steps": 10}
        async with world(16, NODES, **options) as w:
            for number in range(NODES):
                w.start(number, train_s=10.0 + 3 * number)
            idle = mark_idle(w)
            await w.until(w.all_final)
            w.check_agreement()
            assert len({node.worker.state for node in w.nodes.values()}) == 1
            assert all(idle in unweighed(node)[0] for node in w.nodes.values())

    run_virtual(story())


def test_in_a_run_with_audits_a_contribution_without_verdicts_does_not_count(world):
    spec = audited(world(2, 1).spec)
    plain = Contribution(0, digest(b"base"), digest(b"payload"), 1, 1, 64, 1.0)
    full = AuditedContribution(**msgspec.structs.asdict(plain), verdicts=())
    entries = [sign_entry(spec.id, Identity(bytes([1]) * 32), 0, b"", body) for body in (plain, full)]
    assert [is_lawful(spec, entry) for entry in entries] == [False, True]
    unaudited = msgspec.structs.replace(spec, audit=msgspec.UNSET)
    assert [is_lawful(unaudited, entry) for entry in entries] == [True, False]


def real(spec):
    outer = msgspec.structs.replace(spec.outer, stages=(Stage(0, 4),), floor_256=64)
    data = msgspec.structs.replace(spec.data, source="synthetic:markov?size=262144")
    inner = msgspec.structs.replace(spec.inner, lr=3e-3, batch=8)
    return msgspec.structs.replace(spec, outer=outer, data=data, inner=inner, audit=AuditSpec(windows=32))


def test_real_workers_find_work_in_real_contributions(world):
    torch.set_num_threads(1)
    seen = Seen({}, {}, {}, {})

    async def story() -> None:
        async with world(4, 3, worker=lambda *args: RealWorker(*args, seen=seen), adjust=real) as w:
            for number in range(3):
                w.start(number)
            await w.until(w.all_final)
            w.check_agreement()
            found = [row for node in w.nodes.values() for row in events(node, "audited")]
            assert len({(row["round"], row["peer"]) for row in found}) >= 9
            assert sum(row["excess"] for row in found if row["round"] < 3) > 9 * 16, "above a deviation on average"
            feed = [entry.body for entry in w.nodes[0].driver.net.entries()]
            assert sum(len(body.verdicts) for body in feed if isinstance(body, AuditedContribution)) >= 6

    run_virtual(story())
