"""A missing answer costs a reducer its slice only where two members did not get it."""

import pytest

from atoll.node.daemon.reduction.complaints import ENOUGH, MOST_CHECKED, MOST_UNFOUNDED, Complaints
from atoll.protocols.ledger.records import Unanswered


@pytest.fixture
def here(small):
    """The complaints at member 0, a Reduction of member 1, and what was published and found silent."""
    world, said, silent = small.world, [], []
    claim = world.reduce(1, small.offers)
    chunk = claim.body.span.start
    return world, Complaints(world.peers[0], said.append, silent.append), claim, chunk, said, silent


def complaint(claim, chunk):
    return Unanswered(claim.body.round, claim.entry, chunk)


def test_one_member_without_an_answer_complains_and_doubts_nothing(here):
    _, complaints, claim, chunk, said, silent = here
    complaints.note_unanswered(claim, chunk)
    complaints.note_unanswered(claim, chunk)
    assert said == [complaint(claim, chunk)], "it says so once"
    assert silent == []


def test_a_complaint_of_another_is_checked_and_not_believed(here):
    world, complaints, claim, chunk, said, silent = here
    assert complaints.add(world.peers[2], complaint(claim, chunk), claim)
    assert (said, silent) == ([], [])
    complaints.note_unanswered(claim, chunk)
    assert silent == [claim.entry]


def test_with_one_that_did_not_answer_us_either_a_complaint_is_enough(here):
    world, complaints, claim, chunk, _, silent = here
    complaints.note_unanswered(claim, chunk)
    assert not complaints.add(world.peers[2], complaint(claim, chunk), claim), "it was asked already"
    assert silent == [claim.entry]
    complaints.add(world.peers[3], complaint(claim, chunk), claim)
    assert silent == [claim.entry], "once"


def test_complaints_that_say_nothing_do_not_count(here):
    world, complaints, claim, chunk, _, silent = here
    complaints.note_unanswered(claim, chunk)
    assert not complaints.add(world.peers[1], complaint(claim, chunk), claim), "of the reducer"
    assert not complaints.add(world.peers[0], complaint(claim, chunk), claim), "our own"
    assert not complaints.add(world.peers[2], complaint(claim, claim.body.span.stop), claim), "of no chunk of it"
    assert not complaints.add(world.peers[2], Unanswered(claim.body.round + 1, claim.entry, chunk), claim)
    assert not complaints.add(world.peers[2], complaint(claim, chunk), None), "of an unknown Reduction"
    assert silent == []


def test_a_few_complaints_are_enough_for_the_ledger(here):
    world, complaints, claim, chunk, said, silent = here
    for peer in world.peers[2 : 2 + ENOUGH]:
        complaints.add(peer, complaint(claim, chunk), claim)
    complaints.note_unanswered(claim, chunk)
    assert said == []
    assert silent == [claim.entry]


def test_complaints_cost_this_node_a_bounded_number_of_openings(here):
    _, complaints, claim, chunk, *_ = here
    others = [str(number) for number in range(3 * MOST_CHECKED)]
    assert sum(complaints.add(peer, complaint(claim, chunk), claim) for peer in others) == MOST_CHECKED


def test_who_complains_without_reason_is_not_heard(here):
    world, complaints, claim, chunk, _, silent = here
    for _ in range(MOST_UNFOUNDED):
        complaints.note_answered(world.peers[2])
    complaints.note_unanswered(claim, chunk)
    complaints.add(world.peers[2], complaint(claim, chunk), claim)
    assert silent == []


def test_old_rounds_are_forgotten(here):
    world, complaints, claim, chunk, *_ = here
    complaints.note_unanswered(claim, chunk)
    complaints.add(world.peers[2], complaint(claim, chunk), claim)
    assert complaints.silent == {claim.entry}
    complaints.forget(claim.body.round + 1)
    assert not any(
        (complaints.silent, complaints._by, complaints._rounds, complaints._unanswered, complaints._checked)
    )
