"""Owners whose turns passed unused have none for some rounds, and come back; never a third of the voters."""

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocols.ids import PeerId
from atoll.protocols.ledger.turns import KEPT, MOST_TERMS, TERM, OwnerTurns

PEERS = tuple(PeerId(f"peer-{number}") for number in range(10))
A, B, C, D, E = PEERS[:5]


def played(*attempts, voters=PEERS, turns=None):
    """The turns after rounds that were decided in these attempts, by the same voters in the same order."""
    turns = turns or OwnerTurns()
    for number, attempt in enumerate(attempts):
        turns = turns.after(number, voters, attempt, voters)
    return turns


def rounds_without(turns, peer, number, voters=PEERS):
    """How many rounds after `number` pass until a peer has its turn again."""
    many = 0
    while peer in turns.without:
        many += 1
        turns = turns.after(number + many, voters, 0, voters)
    return many


def test_owners_before_the_ballot_that_decided_have_no_turn_in_the_next_rounds():
    assert played(0, 0).without == frozenset()
    assert played(2, 2).without == {A, B}
    assert rounds_without(played(2, 2), A, 1) == TERM * len(PEERS)


def test_one_turn_that_passed_is_bad_luck():
    memory = 2 * TERM * len(PEERS)
    assert played(2).without == frozenset()
    assert played(1, *[0] * (memory - 1), 1).without == {A}
    assert played(1, *[0] * memory, 1).without == frozenset()


def test_who_lets_a_turn_pass_again_has_none_for_twice_as_long():
    turns, number, terms = played(1, 1), 1, []
    for _ in range(6):
        terms.append(rounds_without(turns, A, number) // (TERM * len(PEERS)))
        for _ in range(rounds_without(turns, A, number)):
            number += 1
            turns = turns.after(number, PEERS, 0, PEERS)
        number += 1
        turns = turns.after(number, PEERS, 1, PEERS)
    assert terms[:4] == [1, 2, 4, MOST_TERMS]
    assert max(terms) == MOST_TERMS


def test_a_third_of_many_voters_is_remembered():
    many = tuple(PeerId(f"peer-{number}") for number in range(200))
    assert len(played(66, 66, voters=many).without) == 66


def test_who_has_no_turn_cannot_let_it_pass():
    """Its ballots come to nothing, though it may be honest again: its term is over as it began."""
    turns = played(*[1] * (TERM * len(PEERS) + 1))
    assert turns.without == {A}
    assert turns.after(TERM * len(PEERS) + 1, PEERS, 0, PEERS).without == frozenset()


def test_a_third_of_the_voters_have_no_turn_and_of_more_the_newest():
    turns, others = played(3, 3), (D, E, A, B, C, *PEERS[5:])
    assert turns.without == {A, B, C}
    assert turns.after(2, others, 2, PEERS).after(3, others, 2, PEERS).without == {D, E, A}
    assert played(1, 1, voters=PEERS[:3]).without == frozenset(), "of three voters no one may be left out"
    assert played(1, 1, voters=PEERS[:4]).without == {A}


def test_nobody_is_to_blame_where_more_let_turns_pass_than_may_lie():
    """A partition, or a bad network: after it all have turns, also those that had none before."""
    turns = played(1, 1)
    assert turns.after(2, PEERS[::-1], 2, PEERS).after(3, PEERS[::-1], 2, PEERS).without == {A, *PEERS[-2:]}
    assert turns.after(2, PEERS[::-1], 4, PEERS) == OwnerTurns()
    assert turns.after(2, PEERS, 25, PEERS) == OwnerTurns()


def test_who_is_no_voter_takes_no_place():
    turns = played(3, 3).after(2, PEERS, 3, PEERS[1:])
    assert turns.without == {B, C}


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.permutations(PEERS), st.integers(0, 12), st.integers(1, 10)), max_size=40),
)
def test_honest_owners_never_cut_off_one_another(rounds):
    """More than two thirds of the voters have their turns, and the state stays small."""
    turns = OwnerTurns()
    for number, (voters, attempt, count) in enumerate(rounds):
        following = tuple(voters[:count])
        turns = turns.after(number, tuple(voters), attempt, following)
        assert 3 * len(turns.without) < len(following)
        assert turns.without <= {*following}
        assert len(turns.passed) <= KEPT
    for after in range(len(rounds), len(rounds) + TERM * len(PEERS) * MOST_TERMS):
        turns = turns.after(after, PEERS, 0, PEERS)
    assert not turns.without
