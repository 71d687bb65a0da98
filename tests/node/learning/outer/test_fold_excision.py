"""The laws of corrections: Θ is what it would be if the final rounds had had the smaller sets all the time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node.learning.outer.fold import round_set
from atoll.protocols.errors import Divergence
from tests.node.learning.outer.test_fold import SALTS, fragment_world, parts

ROUNDS = 4
NAMES = st.frozensets(st.sampled_from(SALTS), max_size=4)
LAWS = settings(max_examples=25, deadline=None)


def shrunk(world, number, before, after):
    return round_set(number, parts(world, before)), round_set(number, parts(world, after))


def finals_of(world, sets, **more):
    """A fold whose first rounds are final with these sets."""
    fold = world.fold(**more)
    for number, salts in enumerate(sets):
        fold.finalize(number, parts(world, salts))
    return fold


@LAWS
@given(st.lists(NAMES, min_size=ROUNDS, max_size=ROUNDS), st.sets(st.sampled_from(SALTS)), NAMES, NAMES)
def test_excising_gives_bit_for_bit_the_fold_of_the_sets_without_that_author(world, sets, gone, newest, ahead):
    """Whatever other rounds are open meanwhile; and the check finds the same before anything changes."""
    left = [salts - gone for salts in sets]
    fold = finals_of(world, sets)
    fold.set_round(ROUNDS, parts(world, newest | gone))  # the view may have another set of the round
    fold.set_round(ROUNDS + 1, parts(world, ahead))
    changed = [shrunk(world, at, sets[at], left[at]) for at in range(ROUNDS) if sets[at] != left[at]]
    before = fold.view_digest()
    found = fold.check(ROUNDS, parts(world, newest), changed)
    assert fold.view_digest() == before
    assert fold.finalize(ROUNDS, parts(world, newest), changed) == found
    plain = finals_of(world, [*left, newest])
    plain.set_round(ROUNDS + 1, parts(world, ahead))
    assert fold.state_digest() == plain.state_digest() == found
    assert fold.view_digest() == plain.view_digest()


@LAWS
@given(st.lists(NAMES, min_size=2, max_size=2), st.sampled_from(SALTS), st.sampled_from(SALTS))
def test_one_after_the_other_gives_the_bits_of_both_at_once(world, sets, one, other):
    fold, middle, left = finals_of(world, sets), [s - {one} for s in sets], [s - {one, other} for s in sets]
    fold.finalize(2, (), [shrunk(world, at, sets[at], middle[at]) for at in range(2)])
    fold.finalize(3, (), [shrunk(world, at, middle[at], left[at]) for at in range(2)])
    assert fold.state_digest() == finals_of(world, left).state_digest()


def test_a_round_of_another_fragment_is_corrected_in_its_own_rows(world):
    sets, gone = [SALTS[:3], SALTS[1:4]], SALTS[1]
    left = [[salt for salt in salts if salt != gone] for salts in sets]
    fold, _, _ = fragment_world(world)
    for number, salts in enumerate(sets):
        fold.finalize(number, parts(world, salts))
    fold.finalize(2, parts(world, SALTS[4:]), [shrunk(world, at, sets[at], left[at]) for at in range(2)])
    plain, _, _ = fragment_world(world)
    for number, salts in enumerate([*left, SALTS[4:]]):
        plain.finalize(number, parts(world, salts))
    assert fold.state_digest() == plain.state_digest()


def test_an_update_that_is_no_sum_is_not_taken_out(world):
    fold = finals_of(world, [SALTS[:2]], after=lambda number: lambda theta: None)
    changed = [shrunk(world, 0, SALTS[:2], SALTS[:1])]
    before = fold.state_digest()
    with pytest.raises(Divergence, match="merge"):
        fold.finalize(1, parts(world, SALTS[2:3]), changed)
    assert fold.state_digest() == before
