"""The parts that weigh learn of sets."""

from types import SimpleNamespace

from atoll.node.daemon.audits.weighing import Weighing
from atoll.protocols.ids import PeerId, Round


def test_deciders_reach_the_auditor_before_the_set():
    heard = []
    auditor = SimpleNamespace(note_deciders=lambda *said: heard.append(said))
    weighing = Weighing(auditor=auditor, learners=[lambda *said: heard.append(said)])
    peers = frozenset({PeerId("a")})
    weighing.on_set(Round(3), (), peers)
    assert heard == [(3, peers), (3, (), True)]
    weighing.on_set(Round(4), (), None)
    assert heard[2:] == [(4, (), False)], "nobody knows yet who decides after an open round"
