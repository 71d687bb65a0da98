"""Whom a round waits for, how many are enough, where the others are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.daemon.rounds.participants import (
    SPANS_KEPT,
    Members,
    MemberView,
    RoundBook,
    expected,
    frontier,
    quorum_of,
    rounds_entered,
    rounds_just_left,
    slot_of,
    taking_part,
)
from atoll.protocols.ids import PeerId, Round, digest

ME, A, B, C = (PeerId(name) for name in ("me", "a", "b", "c"))


def book(*held: PeerId, missing: tuple[PeerId, ...] = ()) -> RoundBook:
    """A round's contributions of these authors."""
    names = {author: digest(author.encode()) for author in (*held, *missing)}
    return RoundBook({name: author for author, name in names.items()}, frozenset(names[author] for author in held))


def view(number: int, activity="training", speed: float = 1.0) -> MemberView:
    return MemberView(activity, Round(number), 0.0, tokens_per_s=speed)


def test_a_book_says_what_is_here_and_what_is_missing():
    found = book(A, B, missing=(C,))
    assert (found.there, found.missing) == ({A, B}, [digest(C.encode())])
    assert (RoundBook().there, RoundBook().missing) == (set(), [])


@pytest.mark.parametrize(
    ("number", "activity", "waited"),
    [
        (1, "training", False),
        (2, "training", True),
        (3, "training", True),
        (4, "training", False),
        (3, "syncing", False),
        (3, "paused", False),
        (3, "done", False),
    ],
)
def test_only_members_at_this_round_or_the_one_before_are_waited_for(number, activity, waited):
    assert taking_part({A: view(number, activity)}, 3) == ({A} if waited else set())
    assert (A in expected(ME, 3, RoundBook(), {A: view(number, activity)}, {})) is waited


def test_leases_that_remember_who_is_at_work_remember_it_by_round():
    """It is asked at every event of a round, and leases come at ticks."""
    members = Members({A: view(2), B: view(3), C: view(4)})
    for _ in range(2):
        assert [taking_part(members, number) for number in (3, 4)] == [{A, B}, {B, C}]
        assert taking_part(members, 3, 1) == {A, B, C}
        assert slot_of(ME, 3, members) == (2, 3)
    for number in range(9):
        assert slot_of(ME, number, members)[1] <= 3
        assert len(members.at_work) <= SPANS_KEPT


def test_a_missing_payload_is_waited_for_while_its_author_lives():
    announced = book(missing=(A,))
    assert expected(ME, 3, announced, {}, {}) == {ME}
    assert expected(ME, 3, announced, {A: view(9)}, {}) == {ME, A}
    assert expected(ME, 3, book(A), {}, {}) == {ME, A}


@pytest.mark.parametrize(
    ("count", "share", "needed"), [(1, 1, 1), (4, 128, 2), (5, 128, 3), (4, 171, 3), (4, 256, 4)]
)
def test_quorums_round_up(count, share, needed):
    assert quorum_of(count, share) == needed


@given(st.integers(1, 1024), st.integers(1, 256))
def test_a_quorum_is_reachable_and_never_empty(count, share):
    assert 1 <= quorum_of(count, share) <= count


def test_slots_are_disjoint_and_cover_all():
    peers = [A, B, C, ME]
    places = [slot_of(me, 3, {peer: view(3) for peer in peers if peer != me}) for me in peers]
    assert sorted(places) == [(n, 4) for n in range(4)]
    assert slot_of(ME, 3, {A: view(3, "syncing"), B: view(9)}) == (0, 1)


def test_the_frontier_needs_half_of_all():
    """This node is one of them, and did without the round."""
    others = {A, B, C}
    assert frontier(3, 9, {3: book(A)}, others) == 2
    assert frontier(3, 9, {3: book(A, B)}, others) == 3
    assert frontier(3, 9, {3: book(A, missing=(B,))}, others) == 2
    assert frontier(3, 9, {3: book(A, B), 4: book(A, C)}, others) == 4
    assert frontier(3, 9, {3: book(A)}, {A, B}) == 2
    assert frontier(3, 9, {3: book(A)}, {A}) == 3


def test_nobody_is_pulled_over_an_empty_round():
    assert frontier(3, 9, {7: book(A)}, {A}) == 2
    assert frontier(3, 9, {n: book(A) for n in (3, 4, 5, 7)}, {A}) == 5


def test_the_frontier_stays_in_its_window():
    ones = {n: book(A) for n in range(3, 10)}
    assert frontier(3, 6, ones, {A}) == 6
    assert frontier(3, 6, ones, set()) == 2


def test_who_goes_on_to_the_next_round_has_contributed_to_the_one_before():
    before = {A: view(3), B: view(3), C: view(3)}
    just_left = rounds_just_left(before, {A: view(4), B: view(5), C: view(3)}, {})
    assert just_left == {A: 3}, "B came by a leap, C is still there"
    assert expected(ME, 3, RoundBook(), {A: view(4), B: view(5)}, just_left) == {ME, A}
    assert expected(ME, 3, RoundBook(), {A: view(4), B: view(5)}, {}) == {ME}


def test_a_walk_is_remembered_until_the_next_one():
    just_left = rounds_just_left({A: view(3)}, {A: view(4)}, {})
    just_left = rounds_just_left({A: view(4)}, {A: view(4, "paused")}, just_left)
    assert just_left == {A: 3}
    assert rounds_just_left({A: view(4)}, {A: view(5)}, just_left) == {A: 4}
    assert rounds_just_left({A: view(4)}, {A: view(7)}, just_left) == {}
    assert rounds_just_left({A: view(4)}, {}, just_left) == {}
    assert rounds_just_left({}, {A: view(4)}, {}) == {}
    assert rounds_just_left({A: view(3, "syncing")}, {A: view(4)}, {}) == {}, "who synced trained nothing"
    killed = {A: view(4, speed=0.0)}
    assert rounds_just_left({A: view(3)}, killed, {}) == {}, "who has no speed has trained nothing since its start"


def test_leases_that_are_the_same_objects_say_what_equal_ones_say():
    before = {A: view(4), B: view(4), C: view(4)}
    now = {A: before[A], B: view(5)}  # C is gone
    equal = {A: view(4), B: view(5)}
    just_left, entered = {A: 3, C: 3}, {A: 1.0, B: 1.0, C: 1.0}
    assert rounds_just_left(before, now, just_left) == rounds_just_left(before, equal, just_left) == {A: 3, B: 4}
    assert rounds_entered(before, now, entered) == rounds_entered(before, equal, entered) == {A: 1.0, B: 0.0}


def test_with_overlap_slots_count_members_that_are_a_round_ahead():
    peers = [A, B, ME]
    at = {A: 4, B: 3, ME: 2}
    for me in peers:
        others = {peer: view(at[peer]) for peer in peers if peer != me}
        assert slot_of(me, 3, others, 1) == (sorted(peers).index(me), 3)
    assert slot_of(ME, 3, {A: view(4)}) == (0, 1)
