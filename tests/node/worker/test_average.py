"""A worker that averages final states: the same bits whatever is restarted, saved with the round that it is of."""

import msgspec
import pytest
import torch

from atoll.node.checkpoint.local import AVERAGE
from atoll.node.import_export.export_run import saved_weights
from atoll.node.learning.outer.average import StateAverage
from atoll.node.learning.outer.fixed import state_digest
from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import Round
from atoll.protocols.local.worker_messages import AdoptRequest, FinalizeRequest, SnapshotRequest
from tests.node.worker.session_home import SPEC, Home, member

ROUNDS = 4


def trained(home, count, restarts=False):
    """Final states of rounds 0 … count − 1."""
    found = []
    for number in range(count):
        pending = home.train(number).pending
        if restarts:
            home.restart()
        home.ask(FinalizeRequest(Round(number), (member(pending),)))
        if restarts:
            home.restart()
        found.append(home.session._fold.final_C4096.clone())
    return found


def averaged(states):
    """As the worker should have it."""
    average = StateAverage(ROUNDS)
    for number, state in enumerate(states):
        average.add(state, number)
    return average.values_C4096


@pytest.mark.parametrize("restarts", [False, True])
def test_the_average_of_final_states_is_saved_beside_them_and_survives_restarts(tmp_path, restarts):
    home = Home(tmp_path / "a", average_rounds=ROUNDS)
    states = trained(home, 3, restarts)
    saved = home.saved()
    assert saved.body.final == 2
    assert torch.equal(saved.tensors[AVERAGE], averaged(states))
    assert not torch.equal(saved.tensors[AVERAGE], states[-1])
    found = saved_weights(SPEC, home.path, average=True)
    assert (found.round, found.state) == (2, state_digest(saved.tensors[AVERAGE]))
    assert torch.equal(found.theta_C4096, saved.tensors[AVERAGE])
    assert torch.equal(saved_weights(SPEC, home.path).theta_C4096, states[-1])


def test_a_node_that_was_not_asked_keeps_none_and_says_so(tmp_path):
    home = Home(tmp_path / "a")
    trained(home, 1)
    assert AVERAGE not in home.saved().tensors
    with pytest.raises(ConfigError, match="keeps no average") as caught:
        saved_weights(SPEC, home.path, average=True)
    assert "average_rounds" in caught.value.line()


def test_a_node_that_is_asked_later_begins_with_its_state_and_one_that_is_no_longer_asked_ends(tmp_path):
    home = Home(tmp_path / "a")
    trained(home, 2)
    home.start = msgspec.structs.replace(home.start, average_rounds=ROUNDS)
    home.restart()
    pending = home.train(2).pending
    home.ask(FinalizeRequest(Round(2), (member(pending),)))
    assert torch.equal(home.saved().tensors[AVERAGE], home.session._fold.final_C4096)
    home.start = msgspec.structs.replace(home.start, average_rounds=0)
    home.restart()
    home.train(3)
    assert AVERAGE not in home.saved().tensors


def test_the_average_begins_anew_at_an_adopted_state(tmp_path):
    other, home = Home(tmp_path / "b"), Home(tmp_path / "a", average_rounds=ROUNDS)
    trained(home, 1)
    final = trained(other, 3)[-1]
    snapshot = other.ask(SnapshotRequest(str(tmp_path / "b" / "snapshot")))
    home.ask(AdoptRequest(snapshot.round, snapshot.path, snapshot.state, ()))
    assert torch.equal(home.saved().tensors[AVERAGE], final)
