"""Lines about a model that a node lacks."""

import pytest
from msgspec.structs import replace

from atoll.node.daemon.rounds import machine
from atoll.node.daemon.rounds.state import Phase, RoundConfig
from atoll.node.daemon.standing_still.absent_members import no_model
from atoll.protocols.ids import PeerId

FRESH = machine.begin(RoundConfig(PeerId("me"), 99, 192, 128, 60.0))


@pytest.mark.parametrize("phase", [Phase.TRAIN, Phase.COLLECT, Phase.FOLD, Phase.GATHER])
def test_a_node_that_works_in_a_new_run_waits_for_no_model(phase):
    """The first round is final, and its fold has not ended: Θ_final has no round yet, and none is missing."""
    assert no_model(replace(FRESH, phase=phase), 0, -1, dict) == ""


@pytest.mark.parametrize("phase", [Phase.SYNC, Phase.CATCH_UP])
def test_a_node_that_fetches_and_has_no_model_waits_for_one(phase):
    state = replace(FRESH, phase=phase)
    assert no_model(state, 3, -1, dict) == "waiting for the model of round 3: no member that is here offers it"
    assert no_model(state, 3, 0, dict) == no_model(state, -1, -1, dict) == ""
