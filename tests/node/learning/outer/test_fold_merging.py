"""The fold with a move after some rounds: still a function of the sets, whoever made which round final when."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node.learning.model.merging import merge
from atoll.node.learning.outer.fixed import clear, padding_of, state_digest
from atoll.protocols.run.model_spec import ExpertsSpec, ModelSpec
from tests.node.learning.outer.conftest import World

E = 4
MODEL = ModelSpec(
    dim=40, layers=1, heads=4, kv_heads=2, ffn=16, vocab=20, context=16, tied=True, rope_theta=1e4, norm_eps=1e-5,
    experts=ExpertsSpec(count=E, per_token=2, ffn=8),
)  # fmt: skip
ROUNDS = 4
SALTS = list(range(5))
SETS = st.lists(st.frozensets(st.sampled_from(SALTS), max_size=3), min_size=ROUNDS, max_size=ROUNDS)
LAWS = settings(max_examples=40, deadline=None)


def after(number):
    """Rounds 1 and 2: two in a row, with rounds before and behind them; by different shares."""
    return partial(merge, model=MODEL, alpha=(1 << 24) // (1 + number), donors=2) if number in (1, 2) else None


@pytest.fixture(scope="module")
def world():
    return World(MODEL)


def parts(world, salts):
    return [world.part(salt) for salt in salts]


def states(world, sets):
    """Digest of Θ after each round, from nothing, one round after the other."""
    padding, theta, found = padding_of(world.arena), world.fold().final_C4096.clone(), []
    for number, salts in enumerate(sets):
        members = parts(world, sorted(salts))
        theta = theta + clear(world.update(members, world.arena.chunks), padding)
        if salts and (move := after(number)) is not None:
            move(theta)
        found.append(state_digest(theta))
    return found


def live(world, sets, random):
    """A node that hears of the sets in any order and grouping, and makes rounds final when it likes."""
    fold, heard = world.fold(after=after), [set() for _ in sets]
    todo = [(number, salt) for number, salts in enumerate(sets) for salt in salts]
    random.shuffle(todo)
    while todo:
        if random.random() < 0.4 and fold.final_round + 1 < len(sets):
            number = fold.final_round + 1
            expected = fold.check(number, parts(world, sets[number]))
            assert fold.finalize(number, parts(world, sets[number])) == expected
        number, salt = todo.pop()
        if number <= fold.final_round:
            continue
        heard[number].add(salt)
        fold.set_round(number, parts(world, heard[number]))
        if random.random() < 0.3:  # one that does not belong there, for a while
            fold.set_round(number, parts(world, heard[number] | {9}))
            fold.set_round(number, parts(world, heard[number]))
    return fold


@LAWS
@given(SETS, st.randoms(use_true_random=False))
def test_views_of_equal_sets_are_equal_however_far_finality_is(world, sets, random):
    wanted = states(world, sets)
    one, two = live(world, sets, random), live(world, sets, random)
    assert one.view_digest() == two.view_digest() == wanted[-1]
    for fold in (one, two):
        assert fold.final_round < 0 or fold.state_digest() == wanted[fold.final_round]
        for number in range(fold.final_round + 1, ROUNDS):
            assert fold.finalize(number, parts(world, sets[number])) == wanted[number]
            assert fold.view_digest() == wanted[-1], "that a round is final here now changes no view"


@LAWS
@given(SETS, st.integers(0, ROUNDS - 1), st.sampled_from(SALTS))
def test_removing_restores_exactly_what_was(world, sets, number, salt):
    fold = world.fold(after=after)
    for at, salts in enumerate(sets):
        fold.set_round(at, parts(world, salts))
    before = fold.view_digest()
    fold.set_round(number, parts(world, sets[number] ^ {salt}))
    assert fold.view_digest() != before
    fold.set_round(number, parts(world, sets[number]))
    assert fold.view_digest() == before == states(world, sets)[-1]
    for at in range(ROUNDS):
        fold.set_round(at, [])
    assert fold.view_digest() == fold.state_digest(), "no contribution, no merge"


@LAWS
@given(SETS, st.integers(0, ROUNDS - 1), st.randoms(use_true_random=False))
def test_who_adopts_a_state_goes_on_as_the_others(world, sets, at, random):
    source, fold = world.fold(after=after), live(world, sets[:at], random)
    for number in range(at + 1):
        source.finalize(number, parts(world, sets[number]))
    fold.adopt(source.final_C4096, at)
    for number in range(at + 1, ROUNDS):
        fold.set_round(number, parts(world, sets[number]))
    assert fold.view_digest() == states(world, sets)[-1]


def test_a_merge_moves_experts_and_nothing_else(world):
    fold, plain = world.fold(after=after), world.fold()
    for number in range(2):
        assert torch.equal(plain.final_C4096, fold.final_C4096)
        for one in (fold, plain):
            one.finalize(number, parts(world, [number]))
    moved = set(torch.nonzero((fold.final_C4096 != plain.final_C4096).any(1)).flatten().tolist())
    inside = {
        chunk
        for place in world.arena.placements
        if ".experts." in place.name
        for chunk in range(place.first_chunk, place.first_chunk + place.blocks[0] * place.blocks[1])
    }
    assert moved == inside


def test_a_merge_that_no_payload_reached_is_none(world):
    fold = world.fold(after=after)
    before = fold.state_digest()
    for number in range(ROUNDS):
        assert fold.check(number, []) == fold.finalize(number, []) == before
