"""What those that stay lack, and how long a leaving node waits for them: pure decisions."""

import pytest

from atoll.node.daemon.leaving.holders import (
    IN_VAIN_S,
    LONGEST_S,
    STILL_S,
    Lacking,
    Needs,
    Stayer,
    Step,
    find_lacking,
    next_step,
)
from atoll.protocols.ids import Digest, Round

A, B, C, OPEN = (Digest(bytes([number]) * 32) for number in range(4))
NEEDS = Needs(Round(6), {5: frozenset({A}), 6: frozenset({B, C})}, {7: frozenset({OPEN})})
ALL = frozenset({A, B, C, OPEN})
TRAINER = Stayer(5, 7, offers_model=True, is_voter=True)
SEEDER = Stayer(6, 7, offers_model=True, is_voter=False)
LOADING = Stayer(-1, 0, offers_model=False, is_voter=False)
RELAY = Stayer(6, 7, offers_model=False, is_voter=False)


def lacks(*stayers, held=ALL, needs=NEEDS):
    return find_lacking(needs, stayers, held)


def test_nobody_that_took_the_ledger_lacks_the_records():
    assert find_lacking(NEEDS, [], ALL).records


def test_a_member_with_the_state_and_the_open_payloads_is_enough():
    assert not lacks(SEEDER)
    assert not lacks(SEEDER, held={OPEN}), "its snapshot is of the newest state"
    assert lacks(SEEDER, held=ALL - {OPEN}).payloads == 1


def test_a_trainer_whose_lease_is_a_round_old_proves_the_state_by_its_payloads():
    assert not lacks(TRAINER)
    assert lacks(TRAINER, held=ALL - {C}).model, "it trains on without a payload of the final set"
    assert not lacks(TRAINER, held=ALL - {A}), "that round it has folded"


def test_a_lease_that_names_the_round_and_offers_no_model_proves_nothing():
    assert lacks(RELAY, held={OPEN}).model
    assert not lacks(RELAY, held=ALL), "what has the newest payloads has folded them: it is no relay"


def test_a_member_that_is_far_behind_needs_rounds_whose_payloads_are_gone():
    assert lacks(LOADING).model
    assert lacks(Stayer(3, 4, offers_model=True, is_voter=False)).model
    assert not lacks(Stayer(4, 5, offers_model=True, is_voter=False))


def test_of_a_reduced_round_the_next_voters_have_the_state():
    needs = Needs(Round(6))
    assert not lacks(TRAINER, held=frozenset(), needs=needs)
    assert lacks(Stayer(5, 6, offers_model=True, is_voter=True), held=frozenset(), needs=needs).model
    assert lacks(Stayer(5, 7, offers_model=True, is_voter=False), held=frozenset(), needs=needs).model


def test_a_node_without_a_model_has_nothing_but_its_records():
    assert not lacks(LOADING, held=frozenset(), needs=Needs())


def test_what_is_asked_of_a_member_is_what_it_lacks_and_at_least_the_newest_round():
    assert NEEDS.blobs(4) == ALL
    assert NEEDS.blobs(5) == {B, C, OPEN}
    assert NEEDS.blobs(6) == {B, C, OPEN}
    assert NEEDS.blobs(7) == {B, C}


def test_work_in_a_round_that_became_final_without_it_is_late_and_nobody_takes_it():
    further = Stayer(7, 8, offers_model=True, is_voter=True)
    assert not lacks(further, SEEDER, held=frozenset())


MODEL = Lacking(model=True)


@pytest.mark.parametrize(
    ("lacking", "waited_s", "still_s", "step"),
    [
        (Lacking(), 0.0, 0.0, Step.END),
        (MODEL, STILL_S - 1, STILL_S - 1, Step.WAIT),
        (MODEL, STILL_S, STILL_S, Step.GIVE_UP),
        (MODEL, LONGEST_S - 1, 1.0, Step.WAIT),
        (MODEL, LONGEST_S, 0.0, Step.GIVE_UP),
        (Lacking(model=True, can_come=False), IN_VAIN_S, IN_VAIN_S, Step.GIVE_UP),
        (Lacking(text=True), IN_VAIN_S, IN_VAIN_S, Step.GIVE_UP),
        (Lacking(text=True), STILL_S, 1.0, Step.WAIT),
        (Lacking(text=True, payloads=1), IN_VAIN_S, IN_VAIN_S, Step.WAIT),
    ],
)
def test_the_wait_is_bounded_and_short_where_nobody_can_take_it(lacking, waited_s, still_s, step):
    assert next_step(lacking, waited_s, still_s) is step


def test_only_relays_take_nothing():
    assert not lacks(RELAY, held=frozenset()).can_come
    assert lacks(RELAY, LOADING, held=frozenset()).can_come
    assert lacks(RELAY, TRAINER, held=frozenset()).can_come


def test_people_read_what_is_lacking():
    found = Lacking(model=True, payloads=2, text=True).words(6)
    assert found == "the model of round 6, 2 payloads of open rounds, all of the run's text"
