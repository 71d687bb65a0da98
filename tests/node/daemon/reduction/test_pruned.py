"""What authors that show no work may leave in a reduced run: little while they are here, nothing once pruned."""

from types import SimpleNamespace

import pytest

from atoll.node.daemon.reduction.complaints import Complaints
from atoll.node.daemon.reduction.coordinator import ReductionCoordinator
from atoll.node.daemon.reduction.doubts import WAITING_KEPT, Doubts
from atoll.node.daemon.reduction.fault_reports import FaultReports
from atoll.node.daemon.reduction.ledger_view import ReductionLedger
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Digest, Round, RunId, digest
from atoll.protocols.ledger.records import ReductionFault, SlicedContribution, Unanswered
from atoll.protocols.ledger.reduction import ReductionRules
from atoll.protocols.run.slices import ReduceSpec

RUN = RunId(digest(b"pruned"))
ME, EVE, ANN = (Identity(bytes([n]) * 32).peer_id for n in (1, 2, 3))
SPEC = ReduceSpec(k=4)
LAST = 10
FAR = LAST + 1 + SPEC.gap


def entry(author, seq, number):
    name = digest(author.encode(), seq.to_bytes(4, "big"))
    body = SlicedContribution(Round(number), digest(b"b"), name, 1, 1, 64, 1.0, Digest(bytes(32)))
    return SimpleNamespace(id=name, author=author, seq=seq, body=body)


def ledger_of(*entries):
    ledger = ReductionLedger(ME, ReductionRules(RUN, 64, 16, 32, 64), SPEC)
    for one in entries:
        ledger.add(one)
    return ledger


def offered(ledger):
    return {number: {*offers} for number, offers in ledger._offers.items()}


def test_contributions_of_an_author_that_the_ledger_let_go_are_forgotten():
    """All but what finality keeps, and the one that may count in a round whose reducers may know it."""
    others = [entry(ANN, 0, LAST + 1), entry(ANN, 1, FAR + 3)]
    first = entry(EVE, 0, LAST + 1)
    again = [entry(EVE, seq, LAST + 1) for seq in range(1, 20)]
    far = [entry(EVE, seq, FAR + seq) for seq in range(20, 60)]
    ledger = ledger_of(first, *others, *again, *far)
    ledger.forget_author(EVE, FAR, {far[7].id})
    kept = ledger_of(first, *others, far[7])
    assert ledger.entries == kept.entries
    assert offered(ledger) == offered(kept)
    assert ledger.offers(LAST + 1) == kept.offers(LAST + 1)
    for one in far:
        ledger.add(one)
    assert ledger.entries == ledger_of(first, *others, *far).entries, "and all of it may come again"


def test_reductions_go_with_their_author(small):
    claim = small.world.reduce(1, small.offers, FAR + 2)
    known = SimpleNamespace(id=claim.entry, author=claim.author, body=claim.body)
    ledger = ledger_of(known)
    ledger.forget_author(claim.author, FAR + 3, ())
    assert ledger.claims, "an open round has it"
    ledger.forget_author(claim.author, FAR, ())
    assert not ledger.claims
    assert not ledger.entries
    assert ledger.add(known) is not None, "and it may come again"


class Node:
    """Doubts of a node whose worker is up."""

    def __init__(self):
        self.ledger, self.tasks = ledger_of(), []
        none = lambda *_, **__: None  # noqa: E731
        self.reports = FaultReports(net=None, rules=self.ledger.rules, ask=none, on_fault=none)
        self.doubts = Doubts(
            ledger=self.ledger,
            auditor=None,
            reports=self.reports,
            complaints=Complaints(ME, none, none),
            start_task=lambda work, name: self.tasks.append((name, work)),
            last_final=lambda: LAST,
            on_doubt=none,
            on_cleared=none,
            on_event=none,
        )

    def step(self):
        self.doubts.step(True)
        return [name for name, _ in self.tasks]

    def know(self, claim):
        self.ledger.add(SimpleNamespace(id=claim.entry, author=claim.author, body=claim.body))


@pytest.fixture
def node():
    found = Node()
    yield found
    for _, work in found.tasks:
        work.close()


def fault(name, number=LAST + 1):
    return ReductionFault(Round(number), name, digest(b"proof", name))


def test_reports_about_reductions_that_nobody_knows_begin_no_check(node, small):
    """Each check fetches a blob of the stranger's choice for up to minutes."""
    for each in range(400):
        node.doubts.add_fault(EVE, fault(digest(b"made up", each.to_bytes(2, "big"))))
        node.doubts.add_fault(EVE, fault(digest(b"far", each.to_bytes(2, "big")), 1000 + each))
    assert node.step() == []
    assert not node.reports.proofs()
    assert len(node.doubts.faults[EVE]) == WAITING_KEPT
    claims = [small.world.reduce(1, small.offers, number) for number in (LAST + 1, LAST + 2)]
    for claim in claims:
        node.doubts.add_fault(ANN, fault(claim.entry))
    assert node.step() == []
    for claim in claims:
        node.know(claim)
    assert node.step() == ["fault"], "once its Reduction is known, and one of an author at a time"
    assert node.step() == ["fault"]
    node.doubts._checking.clear()
    assert node.step() == ["fault", "fault"]


def test_a_report_about_a_far_round_waits_for_it(node, small):
    claim = small.world.reduce(1, small.offers, FAR + 5)
    node.know(claim)
    node.doubts.add_fault(EVE, fault(claim.entry, FAR + 5))
    assert node.step() == []
    node.doubts.last_final = lambda: LAST + 6
    assert node.step() == ["fault"]


def test_a_report_about_an_old_round_is_not_checked_and_its_proof_goes_with_the_round(node):
    node.doubts.add_fault(EVE, fault(digest(b"old"), 0))
    assert node.step() == []
    assert node.reports.proofs() == {digest(b"proof", digest(b"old"))}
    assert not node.doubts.faults


def test_the_newest_complaints_about_what_nobody_knows_wait(node):
    names = [digest(b"made up", each.to_bytes(2, "big")) for each in range(400)]
    for each, name in enumerate(names):
        node.doubts.add_complaint(EVE, Unanswered(Round(1000 + each), name, 1))
    assert node.step() == []
    assert [*node.doubts.unheard[EVE]] == names[-WAITING_KEPT:]
    node.doubts.last_final = lambda: 2000
    assert node.step() == []
    assert node.doubts.unheard == {}, "rounds that are final wait for nothing"


def test_what_an_author_said_that_the_ledger_let_go_is_forgotten(node):
    reducer = ReductionCoordinator.__new__(ReductionCoordinator)
    reducer.machines = SimpleNamespace(finality=SimpleNamespace(last_final=LAST, books={}))
    reducer.ledger, reducer._doubts = node.ledger, node.doubts
    node.ledger.add(entry(EVE, 0, FAR + 1))
    proven = fault(digest(b"proven"))
    for author in (EVE, ANN):
        node.doubts.add_fault(author, fault(digest(b"waits")))
        node.doubts.add_complaint(author, Unanswered(Round(1000), digest(b"waits"), 1))
        node.reports.add_report(author, proven)
        node.reports.add_report(author, fault(digest(b"checked")))
    node.reports.wrong = frozenset([proven.reduction])
    reducer.forget_author(EVE)
    assert [*node.doubts.faults] == [*node.doubts.unheard] == [ANN]
    assert {*node.reports._reports} == {
        (EVE, proven.reduction),
        (ANN, proven.reduction),
        (ANN, digest(b"checked")),
    }, "a valid proof is served to others until its round is old"
    assert not node.ledger.entries
