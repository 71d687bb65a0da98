"""The parts that weigh learn of sets; what a set weighs where audits, probation and copies meet."""

from types import SimpleNamespace

import msgspec
import pytest

from atoll.node.config.roles import TRAINS
from atoll.node.daemon.audits.weighing import Weighing, build_weighing
from atoll.protocols.ids import PeerId, Round, digest
from atoll.protocols.ledger.probation import Tally
from atoll.protocols.ledger.records import Contribution
from atoll.protocols.run.sections.audits import AuditSpec
from tests.node.worker.session_home import SPEC

OLD = PeerId("old")


def test_deciders_reach_the_auditor_before_the_set():
    heard = []
    auditor = SimpleNamespace(note_deciders=lambda *said: heard.append(said))
    weighing = Weighing(auditor=auditor, learners=[lambda *said: heard.append(said)])
    peers = frozenset({PeerId("a")})
    weighing.on_set(Round(3), (), peers)
    assert heard == [(3, peers), (3, (), True)]
    weighing.on_set(Round(4), (), None)
    assert heard[2:] == [(4, (), False)], "nobody knows yet who decides after an open round"


def made_with(by_weight=msgspec.UNSET, **audit):
    pace = msgspec.structs.replace(SPEC.pace, probation=8, probation_256=64)
    outer = msgspec.structs.replace(SPEC.outer, by_weight=by_weight)
    spec = msgspec.structs.replace(SPEC, pace=pace, outer=outer, audit=AuditSpec(**audit))
    context = SimpleNamespace(spec=spec, me=OLD)
    return build_weighing(
        context=context,
        net=None,
        queue=None,
        machines=None,
        worker=None,
        contributions=None,
        prepare=None,
        rng=None,
        work=TRAINS,
        summary=SimpleNamespace(work=Tally(8, 20, {OLD: 20}), round=19),
    )


def weigh(copies, claim=64, **keys):
    """Weights of a member's work, which claims 64, and of so many copies on probation."""
    made = made_with(**keys)
    work = Contribution(Round(20), digest(b"base"), digest(b"payload"), 1, 1, 64, 1.0)
    copy = msgspec.structs.replace(work, weight=claim)
    found = [(digest(OLD.encode()), OLD, work)]
    found += [(digest(author.encode()), author, copy) for author in map("new{}".format, range(copies))]
    weighed = made.weigh(Round(20), found)
    return weighed[found[0][0]], sum(weighed.values())


@pytest.mark.parametrize("copies", [0, 1, 16, 64])
def test_copies_on_probation_take_nothing_from_a_members_payload(copies):
    """What they share is their part of a weight: else they would take part of the whole and lose most of it."""
    own, together = weigh(copies, by_payload=True)
    assert together == 64
    assert own >= 48


def test_a_run_without_the_key_is_weighed_as_before():
    assert [weigh(copies) for copies in (0, 1, 16, 64)] == [(64, 64), (32, 40), (3, 19), (0, 0)]


def test_copies_that_claim_four_rounds_of_work_take_nothing_either():
    """Newcomers are a quarter of the weight before copies share: else they would take most of the payload."""
    assert [weigh(copies, 255, by_payload=True)[0] for copies in (1, 16)] == [33, 5]
    for copies in (1, 16, 64):
        own, together = weigh(copies, 255, by_payload=True, by_weight=True)
        assert together == 64
        assert own >= 53


@pytest.mark.parametrize("by_payload", [True, msgspec.UNSET])
def test_who_audits_leave_without_weight_makes_no_room_for_newcomers(by_payload):
    """Old identities of noise would lend their claims to new ones."""
    authors = (OLD, "gone1", "gone2", *map("new{}".format, range(16)))
    made = made_with(by_payload=by_payload, by_weight=True)
    made.auditor._final, made.auditor._gone[20] = 20, frozenset({"gone1", "gone2"})
    counts = dict.fromkeys(authors[:3], 20)
    made.learners[1].__self__.tally = Tally(8, 20, counts)
    work = Contribution(Round(20), digest(b"base"), digest(b"payload"), 1, 1, 64, 1.0)
    found = [
        (digest(author.encode()), author, msgspec.structs.replace(work, payload=digest(author.encode())))
        for author in authors
    ]
    assert list(made.weigh(Round(20), found).values()) == [64, 0, 0, *[1] * 16]
