"""Owners of ballots take turns: liars that follow one another cost two patiences each, however they act.

The voter is that of test_vote_rule.py: it closed round 1 and the next one at time 0.
"""

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.node.daemon.consensus.proposer import begin_ballot
from atoll.node.daemon.consensus.types import Append, FinalityTick
from atoll.protocols.ids import Round
from atoll.protocols.ledger.records import Ballot, Prepare, Vote
from tests.node.daemon.consensus.test_vote_rule import PATIENCE_S, Voter, named, peers, propose

TICK_S = 0.25


def acts_of(liars):
    """All that owners can do to put off the next one: each opens its ballot, and proposes a narrow set."""
    for attempt, liar in enumerate(liars):
        if attempt:
            yield liar, Prepare(Round(1), Ballot(attempt, liar))
        yield liar, propose(named(liar), liar, attempt)


def prepared(node):
    return [one.body.ballot for one in node.log if isinstance(one, Append) and isinstance(one.body, Prepare)]


def patiences_until_the_next(many, when):
    """How long the first honest owner waits behind so many liars. `when`: patiences after which each act comes."""
    deciders = peers(3 * many + 1)
    node, now = Voter(deciders, deciders[many]).close(*deciders), 0.0
    acts = [(at * PATIENCE_S, *act) for at, act in zip(when, acts_of(deciders[:many]), strict=True)]
    while not prepared(node):
        while acts and acts[0][0] <= now:
            node.hear(*acts.pop(0)[1:])
        now += TICK_S
        node.feed(FinalityTick(now))
    assert prepared(node)[0].attempt == many
    return now / PATIENCE_S


JUST_BEFORE = TICK_S / PATIENCE_S


@pytest.mark.parametrize("many", range(1, 5))
def test_liars_that_act_when_their_turns_end_cost_two_patiences_each(many):
    ends = [2.0 * turn + 1.0 - (turn + 1) * JUST_BEFORE for turn in range(many) for _ in range(2)][1:]
    assert patiences_until_the_next(many, ends) == pytest.approx(2 * many, abs=2 * many * JUST_BEFORE)


@pytest.mark.parametrize("many", range(1, 5))
def test_liars_that_act_when_the_next_owner_would_gain_nothing(many):
    """Before, each act began all the turns anew: two liars cost six patiences, three 12 and four 20."""
    gaps = [left - JUST_BEFORE for left in range(many, 0, -1) for _ in range(2)][:-1]
    ends = list(accumulate(gaps))
    assert patiences_until_the_next(many, ends) <= max(2, many + 1)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_no_owners_cost_more_than_two_patiences_each(data):
    many = data.draw(st.integers(1, 4))
    gaps = data.draw(st.lists(st.integers(0, 40 * many), min_size=2 * many - 1, max_size=2 * many - 1))
    when = [gap * JUST_BEFORE for gap in accumulate(gaps)]
    assert patiences_until_the_next(many, when) <= 2 * many + JUST_BEFORE


def test_a_ballot_that_comes_late_does_not_begin_the_turns_after_it_anew():
    deciders = peers(7)
    node = Voter(deciders, deciders[2]).close(*deciders).feed(FinalityTick(2 * PATIENCE_S - TICK_S))
    node.hear(deciders[1], Prepare(Round(1), Ballot(1, deciders[1])))
    assert node.state.attempt == 1
    assert prepared(node.feed(FinalityTick(2 * PATIENCE_S))) == [Ballot(2, deciders[2])]


def test_turns_that_nobody_could_have_are_not_spent_at_once():
    """Short of a quorum for 25 turns, each owner would open its ballot at once, and cut off the one before."""
    deciders = peers(4)
    node = Voter(deciders, deciders[2]).close(*deciders).feed(FinalityTick(TICK_S))
    begun = begin_ballot(replace(node.state, now=50 * PATIENCE_S), 1)
    assert begun.still.passed_s == PATIENCE_S, "a third of four voters is one"


def test_a_proposal_after_its_turn_does_not_begin_the_turns_anew():
    deciders = peers(7)
    node = Voter(deciders, deciders[2]).close(*deciders).feed(FinalityTick(2 * PATIENCE_S - TICK_S))
    entry = node.hear(deciders[0], propose(named(*deciders), deciders[0]))
    assert Append(Vote(Round(1), Ballot(0, deciders[0]), entry)) in node.log, "it still gets votes"
    assert prepared(node.feed(FinalityTick(2 * PATIENCE_S))) == [Ballot(2, deciders[2])]


def test_who_votes_has_a_patience_from_a_proposal_in_its_turn():
    deciders = peers(7)
    node = Voter(deciders, deciders[1]).close(*deciders).feed(FinalityTick(PATIENCE_S - TICK_S))
    node.hear(deciders[0], propose(named(deciders[0]), deciders[0]))
    assert not prepared(node.feed(FinalityTick(2 * PATIENCE_S - 2 * TICK_S)))
    assert prepared(node.feed(FinalityTick(2 * PATIENCE_S))) == [Ballot(1, deciders[1])]


def test_the_others_find_a_ballot_due_when_its_owner_does():
    """Where a ballot came late, the next one is due half a turn after that one was."""
    deciders = peers(7)
    node = Voter(deciders, deciders[3]).close(*deciders).feed(FinalityTick(1.75 * PATIENCE_S))
    node.hear(deciders[1], Prepare(Round(1), Ballot(1, deciders[1])))
    node.feed(FinalityTick(2 * PATIENCE_S)).hear(deciders[2], Prepare(Round(1), Ballot(2, deciders[2])))
    assert node.state.attempt == 2
