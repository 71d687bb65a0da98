"""Whom a node believes that it says what the model's validation loss is."""

from hypothesis import given
from hypothesis import strategies as st

from atoll.node.daemon.telemetry.validators import OWN_STATES, TOLERANCE, Validators, agree
from atoll.protocols.ids import PeerId, Round, digest
from atoll.protocols.ledger.registers import Validation

A, B, C = (PeerId(name) for name in ("peer-a", "peer-b", "peer-c"))


def state(number):
    return digest(b"state", number.to_bytes(4, "big"))


def says(number, bpb):
    return Validation(Round(number), state(number), bpb)


def test_nobody_is_believed_whose_value_this_node_cannot_compare():
    validators = Validators()
    validators.hear({A: says(3, 2.0)})
    assert not validators.believed
    assert validators.is_in_doubt
    validators.find(state(4), 2.0)
    assert not validators.believed, "that is another state"
    validators.find(state(3), 2.0)
    assert validators.believed == {A: says(3, 2.0)}
    assert not validators.is_in_doubt


def test_whoever_spoke_first_is_compared():
    validators = Validators()
    validators.find(state(3), 2.0)
    validators.hear({A: says(3, 2.0 * (1 - TOLERANCE / 2)), B: says(3, 2.0 * (1 - 2 * TOLERANCE))})
    assert list(validators.believed) == [A]


def test_who_was_wrong_once_is_believed_no_more():
    validators = Validators()
    validators.find(state(3), 2.0)
    validators.find(state(4), 1.9)
    for number, bpb in ((3, 2.0), (4, 1.5), (3, 2.0)):
        validators.hear({A: says(number, bpb)})
    assert not validators.believed
    assert not validators.is_in_doubt, "a value of its own would change nothing"


def test_who_was_believed_is_until_it_is_gone():
    validators = Validators()
    validators.find(state(3), 2.0)
    validators.hear({A: says(3, 2.0)})
    validators.hear({A: says(9, 1.0)})
    assert validators.believed == {A: says(9, 1.0)}
    validators.hear({})
    validators.hear({A: says(9, 1.0)})
    assert not validators.believed


def test_two_that_disagree_are_judged_anew():
    validators = Validators()
    validators.find(state(3), 2.0)
    validators.hear({A: says(3, 2.0), B: says(3, 2.0), C: says(3, 2.0)})
    validators.hear({A: says(9, 1.8), B: says(9, 1.7), C: says(8, 1.9)})
    assert list(validators.believed) == [C]
    validators.find(state(9), 1.8)
    assert list(validators.believed) == [A, C]


@given(st.lists(st.tuples(st.integers(0, 200), st.floats(0.1, 10)), max_size=300))
def test_as_many_own_values_are_remembered_as_rounds_may_be_open(found):
    validators = Validators()
    for number, bpb in found:
        validators.find(state(number), bpb)
    newest = dict.fromkeys(reversed([number for number, _ in found]))
    assert set(validators.own) == {state(number) for number in list(newest)[:OWN_STATES]}


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_agreement_is_mutual(one, other):
    assert agree(one, other) == agree(other, one)
    assert agree(one, one)
