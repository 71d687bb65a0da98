"""What an audit leaves out is drawn by what it weighs: identities that cost nothing are little of it."""

from collections import Counter
from types import SimpleNamespace

import msgspec

from atoll.node.config.roles import TRAINS
from atoll.node.daemon.audits.weighing import build_weighing
from atoll.protocols.ids import PeerId, Round, digest
from atoll.protocols.ledger.probation import Tally
from atoll.protocols.ledger.records import AuditedContribution
from atoll.protocols.run.sections.audits import AuditSpec
from tests.node.worker.session_home import SPEC

MEMBERS, STRANGERS = [PeerId(f"m{at}") for at in range(5)], [PeerId(f"s{at}") for at in range(16)]


def drawn(by_payload, count=64):
    """Requests to audit a set of members, and of strangers on probation that claim four rounds of work."""
    pace = msgspec.structs.replace(SPEC.pace, probation=8, probation_256=64)
    outer = msgspec.structs.replace(SPEC.outer, by_weight=True)
    audit = AuditSpec(each=4, by_payload=by_payload)
    spec = msgspec.structs.replace(SPEC, pace=pace, outer=outer, audit=audit)
    found = [
        (
            digest(author.encode()),
            author,
            AuditedContribution(Round(20), b"", digest(author.encode(), b"blob"), 1, 1, weight, 1.0, verdicts=()),
        )
        for authors, weight in ((MEMBERS, 64), (STRANGERS, 255))
        for author in authors
    ]
    made = build_weighing(
        context=SimpleNamespace(spec=spec, me=MEMBERS[0]),
        net=SimpleNamespace(blob_path=lambda blob: blob.hex()),
        queue=None,
        machines=None,
        worker=None,
        contributions=SimpleNamespace(find=lambda names: found, is_held=lambda name: True),
        prepare=None,
        rng=None,
        work=TRAINS,
        summary=SimpleNamespace(work=Tally(8, 20, dict.fromkeys(MEMBERS, 20)), round=19),
    )
    names = tuple(entry for entry, _, _ in found)
    draw = made.auditor.draws.draw
    return [ask for at in range(count) for ask in draw(Round(20), names, MEMBERS[0], digest(bytes([at]))).values()]


def share(ask):
    """The strangers' part of the mean of eight others."""
    weights = Counter[bool]()
    for other in ask.others[:8]:
        weights[other.author in STRANGERS] += other.weight
    return weights[True] / weights.total()


def test_strangers_are_at_most_a_quarter_of_what_an_audit_leaves_out():
    for by_payload in (True, msgspec.UNSET):
        asked = drawn(by_payload)
        assert all(share(ask) <= 0.25 for ask in asked)
        first = Counter(ask.others[0].author for ask in asked)
        assert len(first) > len(MEMBERS), "in an order that was drawn"
        claimed = [each.weight for each in asked[0].sent if each.author in STRANGERS]
        assert claimed == [255] * len(STRANGERS), "what is audited is what its author claims"
