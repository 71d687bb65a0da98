"""Who may reduce follows from final sets alone, and who misses them tries ever more rarely."""

from hypothesis import given
from hypothesis import strategies as st

from atoll.node.daemon.reduction.places import MOST_DOUBLINGS, after, passed_over

PEERS = ("a", "b", "c")
GAP = 4


def history(rounds, misses_of, gap=GAP):
    """The rounds in which each peer was named, when `misses_of(peer, number)` says who misses its final set."""
    misses, named = {}, {peer: [] for peer in PEERS}
    plans = dict.fromkeys(range(gap), PEERS)
    for number in range(rounds):
        reducers = plans[number]
        for peer in reducers:
            named[peer].append(number)
        present = {peer for peer in reducers if not misses_of(peer, number)}
        misses = after(misses, number, reducers, present, gap)
        absent = passed_over(misses, number)
        plans[number + gap] = tuple(peer for peer in PEERS if peer not in absent)
    return named


def test_a_member_that_misses_again_and_again_tries_ever_more_rarely():
    named = history(1200, lambda peer, _: peer == "a")
    assert named["b"] == list(range(1200))
    tries = [at for at, before in zip(named["a"][1:], named["a"], strict=False) if at > before + 1]
    pauses = [
        after_ - before for before, after_ in zip(named["a"], named["a"][1:], strict=False) if after_ > before + 1
    ]
    assert tries
    assert pauses[:5] == [GAP + 1, 2 * GAP + 1, 4 * GAP + 1, 8 * GAP + 1, 16 * GAP + 1]
    assert max(pauses) == (GAP << MOST_DOUBLINGS) + 1
    assert len(named["a"]) < 60, "most rounds do without it"


def test_one_miss_costs_one_turn_however_many_rounds_were_planned_by_then():
    """The rounds of the next `gap` final sets named it before its miss was known."""
    named = history(40, lambda peer, number: peer == "a" and number == 10)
    assert [n for n in range(40) if n not in named["a"]] == [14, 15, 16, 17]
    named = history(40, lambda peer, number: peer == "a" and 10 <= number < 14)
    assert [n for n in range(40) if n not in named["a"]] == [14, 15, 16, 17], "dead for four rounds is one miss"


def test_a_reduction_in_a_final_set_clears_the_member():
    named = history(60, lambda peer, number: peer == "a" and number in (10, 30))
    assert [n for n in range(60) if n not in named["a"]] == [14, 15, 16, 17, 34, 35, 36, 37]


def test_a_round_that_closed_before_its_reducers_were_known_says_nothing_about_them():
    """Finality was slow: none of them reduced it, and all that were there reduce the rounds after."""
    named = history(60, lambda _, number: 10 <= number < 25)
    assert all(named[peer] == list(range(60)) for peer in PEERS)


def test_misses_count_from_half_of_the_reducers_on():
    """A liar's Reduction beside none of the others' would else make it the only reducer."""
    reducers = ("a", "b", "c", "d")
    assert after({}, 5, reducers, {"d"}, GAP) == {}
    assert after({}, 5, reducers, {"d", "of another plan", "of none"}, GAP) == {}
    assert set(after({}, 5, reducers, {"c", "d"}, GAP)) == {"a", "b"}


def test_a_reduction_clears_its_member_whether_misses_count_or_not():
    missed = after({}, 5, PEERS, {"b", "c"}, GAP)
    assert set(missed) == {"a"}
    assert after(missed, 5 + 2 * GAP, ("a", "b", "c", "d", "e"), {"a"}, GAP) == {}


def test_a_round_whose_reducers_were_known_counts_misses_of_more_than_half_from_the_second_on():
    """One liar that proposes a set may leave out the Reductions of its round."""
    first = after({}, 5, PEERS, (), GAP, is_known=True)
    assert passed_over(first, 5) == passed_over(first, 6) == set()
    assert passed_over(after(first, 6, PEERS, ("a",), GAP, is_known=True), 6) == {"b", "c"}
    assert after(first, 6, PEERS, PEERS, GAP, is_known=True) == {}, "a Reduction in a final set ends the row"
    assert after(first, 6, PEERS, (), GAP) == first, "nobody knew the reducers"


def test_mute_members_that_are_all_reducers_lose_their_places_whoever_they_are():
    mute, misses, plans = {"a", "b", "c"}, {}, dict.fromkeys(range(GAP), PEERS)
    for number in range(40):
        reducers = plans[number]
        misses = after(misses, number, reducers, {*reducers} - mute, GAP, is_known=True)
        able = [peer for peer in (*PEERS, "d", "e", "f") if peer not in passed_over(misses, number)]
        plans[number + GAP] = tuple(able[:3])
    assert sum(bool(mute.intersection(plans[number])) for number in range(8, 40)) < 12


@given(st.sets(st.tuples(st.sampled_from(PEERS), st.integers(0, 60))), st.integers(2, 9))
def test_who_misses_nothing_is_always_named_and_nobody_is_passed_over_for_ever(missed, gap):
    named = history(60 + (gap << MOST_DOUBLINGS) + 2 * gap, lambda *one: one in missed, gap)
    rounds = 60 + (gap << MOST_DOUBLINGS) + 2 * gap
    for peer in PEERS:
        if peer not in {who for who, _ in missed}:
            assert named[peer] == list(range(rounds))
        assert named[peer][-1] == rounds - 1
