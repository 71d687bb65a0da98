"""Lines about a model that a node lacks."""

import pytest
from msgspec.structs import replace

from atoll.node.daemon.rounds import machine
from atoll.node.daemon.rounds.state import Phase, RoundConfig
from atoll.node.daemon.standing_still.absent_members import no_model
from atoll.node.daemon.standing_still.stillness import LEAST_S, Stillness
from atoll.protocols.ids import PeerId, Round, digest
from atoll.protocols.ledger.registers import Lease

FRESH = machine.begin(RoundConfig(PeerId("me"), 99, 192, 128, 60.0))


@pytest.mark.parametrize("phase", [Phase.TRAIN, Phase.COLLECT, Phase.FOLD, Phase.GATHER])
def test_a_node_that_works_in_a_new_run_waits_for_no_model(phase):
    """The first round is final, and its fold has not ended: Θ_final has no round yet, and none is missing."""
    assert no_model(replace(FRESH, phase=phase), 0, -1, dict, Stillness()) == ""


@pytest.mark.parametrize("phase", [Phase.SYNC, Phase.CATCH_UP])
def test_a_node_that_fetches_and_has_no_model_waits_for_one(phase):
    state, still = replace(FRESH, phase=phase), Stillness()
    nobody = "waiting for the model of round 3: no member that is here offers it"
    assert no_model(state, 3, -1, dict, still) == nobody
    assert no_model(state, 3, 0, dict, still) == no_model(state, -1, -1, dict, still) == "", "payloads may come"


@pytest.mark.parametrize(("applied", "offered", "waits"), [(2, 2, True), (2, 3, False), (3, 2, False)])
def test_a_node_whose_rounds_nobody_brings_waits_for_a_newer_model(applied, offered, waits):
    """Those that made them are gone. The model that its neighbour offers is the one that it has."""
    state, still = replace(FRESH, phase=Phase.CATCH_UP), Stillness(still_s=LEAST_S)
    lease = Lease("syncing", Round(3), 3, digest(b"snapshot"), offered, 0.0)
    line = no_model(state, 3, applied, lambda: {PeerId("other"): (lease, 9.0)}, still)
    assert line == "waiting for the model of round 3: no member that is here offers it" * waits


def test_a_node_that_came_up_alone_with_a_model_waits_for_a_peer_not_for_a_model():
    """A saved model is often some rounds old, and their payloads are here."""
    state, still = replace(FRESH, phase=Phase.SYNC), Stillness(still_s=LEAST_S)
    assert no_model(state, 3, 2, dict, still) == ""
