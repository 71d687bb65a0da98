"""The laws of the fold: Θ depends on the sets, and on nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node.learning.outer.fixed import clear, padding_of, plus, state_digest
from atoll.protocols.errors import CorruptFault, DecodeError, Divergence
from atoll.protocols.run.arena import Span
from tests.node.learning.outer.conftest import DirectFold, World, member

GOLDEN = Path(__file__).parents[3] / "golden" / "trajectory.json"
SALTS = list(range(6))
SETS = st.dictionaries(st.integers(0, 2), st.frozensets(st.sampled_from(SALTS), max_size=4), max_size=3)
LAWS = settings(max_examples=25, deadline=None)


def reference(world, sets):
    """Θ₀ + Σ U_r, recomputed from nothing, in int64."""
    padding = padding_of(world.arena)
    theta = clear(world.theta.clone(), padding).to(torch.int64)
    for salts in sets.values():
        members = [world.part(salt) for salt in salts]
        theta += clear(world.update(members, world.arena.chunks), padding)
    return state_digest(theta.to(torch.int32))


def parts(world, salts):
    return [world.part(salt) for salt in salts]


@LAWS
@given(SETS, st.randoms(use_true_random=False))
def test_order_duplication_and_grouping_leave_no_trace(world, sets, random):
    fold = world.fold()
    steps = [(number, salt) for number, salts in sets.items() for salt in salts]
    random.shuffle(steps)
    so_far: dict[int, list[int]] = {}
    for number, salt in steps:  # one by one, in any order, some of them several times: a mean would count that
        so_far.setdefault(number, []).extend([salt] * random.randint(1, 3))
        fold.set_round(number, parts(world, so_far[number]))
    at_once = world.fold()
    for number, salts in sets.items():
        at_once.set_round(number, parts(world, salts))
    assert fold.view_digest() == at_once.view_digest() == reference(world, sets)
    assert fold.state_digest() == world.fold().state_digest()


def merged(one, two):
    return {
        number: one.get(number, frozenset()) | two.get(number, frozenset()) for number in one.keys() | two.keys()
    }


def view_of(world, sets):
    fold = world.fold()
    for number, salts in sets.items():
        fold.set_round(number, parts(world, salts))
    return fold.view_digest()


@LAWS
@given(SETS, SETS, SETS)
def test_merge_is_commutative_associative_and_idempotent(world, one, two, three):
    assert view_of(world, merged(one, two)) == view_of(world, merged(two, one))
    left, right = merged(merged(one, two), three), merged(one, merged(two, three))
    assert view_of(world, left) == view_of(world, right)
    assert view_of(world, merged(one, one)) == view_of(world, one)


@LAWS
@given(SETS, st.integers(0, 2), st.sampled_from(SALTS))
def test_removing_restores_exactly_what_was(world, sets, number, salt):
    fold = world.fold()
    for each, salts in sets.items():
        fold.set_round(each, parts(world, salts))
    before = fold.view_C4096.clone()
    rest = sets.get(number, frozenset()) - {salt}
    fold.set_round(number, parts(world, rest))
    without = fold.view_C4096.clone()
    fold.set_round(number, parts(world, rest | {salt}))
    fold.set_round(number, parts(world, rest))
    assert torch.equal(fold.view_C4096, without)
    fold.set_round(number, parts(world, sets.get(number, frozenset())))
    assert torch.equal(fold.view_C4096, before)
    for each in (0, 1, 2):
        fold.set_round(each, [])
    assert torch.equal(fold.view_C4096, fold.final_C4096)
    assert fold.open_rounds == ()


@LAWS
@given(st.permutations(SALTS), st.integers(0, 6))
def test_late_is_on_time(world, order, cut):
    late, on_time = world.fold(), world.fold()
    late.set_round(0, parts(world, order[:cut]))
    late.set_round(1, parts(world, [0, 1]))
    late.set_round(0, parts(world, order))  # the rest of round 0 after round 1
    assert late.finalize(0, parts(world, order)) == on_time.finalize(0, parts(world, sorted(order)))
    on_time.set_round(1, parts(world, [1, 0]))
    assert late.view_digest() == on_time.view_digest()


def test_a_contribution_that_is_given_twice_counts_once(world):
    """All of them twice would not show in a mean: [a, a, b] does."""
    once, twice = world.fold(), world.fold()
    once.set_round(0, parts(world, [1, 2]))
    for salts in ([1, 1, 2], [2, 1, 2], [1, 2, 2, 2]):
        twice.set_round(0, parts(world, salts))
        assert twice.view_digest() == once.view_digest()
        assert twice.check(0, parts(world, salts)) == once.check(0, parts(world, [1, 2]))
    assert twice.finalize(0, parts(world, [1, 1, 2])) == once.finalize(0, parts(world, [1, 2]))


def test_weights_count_and_belong_to_the_set(world):
    fold = world.fold()
    fold.set_round(0, [world.part(1, 64), world.part(2, 64)])
    before = fold.view_digest()
    fold.set_round(0, [world.part(1, 64), world.part(2, 255)])
    assert fold.view_digest() != before


def test_check_keeps_nothing_and_says_what_finalize_gives(world):
    fold = world.fold()
    fold.set_round(0, parts(world, [0, 1]))
    fold.set_round(1, parts(world, [2]))
    final, view = fold.state_digest(), fold.view_digest()
    expected = fold.check(0, parts(world, [1, 3]))
    assert (fold.state_digest(), fold.view_digest(), fold.open_rounds) == (final, view, (0, 1))
    assert fold.finalize(0, parts(world, [3, 1])) == expected == fold.state_digest()
    assert (fold.final_round, fold.open_rounds) == (0, (1,))
    assert fold.view_digest() == reference(world, {0: [1, 3], 1: [2]})


def test_an_empty_round_may_be_final(world):
    fold = world.fold()
    before = fold.state_digest()
    assert fold.finalize(0, []) == before
    assert fold.final_round == 0


def test_rounds_are_final_one_by_one(world):
    fold = world.fold()
    for number in (-1, 1, 7):
        with pytest.raises(Divergence):
            fold.finalize(number, [])
        with pytest.raises(Divergence):
            fold.check(number, [])
    fold.finalize(0, [])
    with pytest.raises(Divergence):
        fold.set_round(0, [])


def test_adopt_replaces_everything(world):
    source, fold = world.fold(), world.fold()
    source.finalize(0, parts(world, [0, 1]))
    fold.set_round(0, parts(world, [4]))
    fold.adopt(source.final_C4096, 0)
    source.final_C4096[0, 0] += 1  # a copy, not a reference
    assert fold.final_round == 0
    assert fold.open_rounds == ()
    assert fold.view_digest() == fold.state_digest() == reference(world, {0: [0, 1]})
    with pytest.raises(Divergence):
        fold.adopt(fold.final_C4096[:1], 3)


def test_a_bad_payload_leaves_the_state_alone(world):
    fold = world.fold()
    fold.set_round(0, parts(world, [0]))
    before = fold.view_digest()
    world.payloads["bad"] = b"x"
    bad = [world.part(0), member("bad")]
    for ask in (fold.set_round, fold.check, fold.finalize):
        with pytest.raises(DecodeError):
            ask(0, bad)
    assert (fold.view_digest(), fold.final_round) == (before, -1)
    assert fold.finalize(0, parts(world, [0])) == before


def test_overflow_is_divergence_and_leaves_the_state_alone(world):
    top = torch.full_like(world.theta, 2**31 - 1)
    for sign in (1, -1):
        start = top if sign > 0 else -1 - top
        fold = DirectFold(start, world.arena, world.onto, lambda _: world.cover)
        final, view = fold.state_digest(), fold.view_digest()
        for ask in (fold.set_round, fold.check, fold.finalize):
            with pytest.raises(Divergence):
                ask(0, parts(world, [0, 1, 2]))
        assert (fold.state_digest(), fold.view_digest(), fold.final_round) == (final, view, -1)


def test_nobody_moves_the_padding(world):
    padding = padding_of(world.arena)
    inside = torch.zeros((world.arena.chunks, 4096), dtype=torch.bool)
    inside[padding.chunk_P] = ~padding.real_P4096
    assert inside.any()
    everywhere = DirectFold(
        *(world.theta, world.arena),
        *(lambda _, theta: theta + 1, lambda _: world.cover),
    )
    before = everywhere.view_C4096.clone()
    everywhere.set_round(0, parts(world, [0]))
    moved = everywhere.view_C4096 != before
    assert torch.equal(moved, ~inside)
    assert not everywhere.view_C4096[inside].any()


def trajectory(world):
    """Rounds on time, one contribution late, one taken out again, then everything final."""
    fold, found = world.fold(), []

    def step(name):
        found.append({"after": name, "final": fold.state_digest().hex(), "view": fold.view_digest().hex()})

    step("genesis")
    fold.set_round(0, parts(world, [0, 1]))
    step("round 0 of two")
    fold.set_round(1, parts(world, [2, 3]))
    step("round 1 of two")
    fold.set_round(0, parts(world, [0, 1, 4]))
    step("a late one in round 0")
    fold.set_round(1, parts(world, [3]))
    step("one removed from round 1")
    fold.finalize(0, parts(world, [0, 1, 4]))
    step("round 0 final")
    fold.set_round(2, [world.part(5, 255), world.part(0, 1)])
    fold.finalize(1, parts(world, [3]))
    fold.finalize(2, [world.part(0, 1), world.part(5, 255)])
    step("round 2 final")
    return found


def golden():
    """The content of tests/golden/trajectory.json."""
    return trajectory(World())


def test_golden_trajectory():
    found = golden()
    assert found == json.loads(GOLDEN.read_text())
    assert found[-1]["final"] == found[-1]["view"]


AGAIN = """
import importlib.util, json, sys
import torch
torch.set_num_threads({threads})
def load(name):
    spec = importlib.util.spec_from_file_location(name, {folder!r} + "/" + name + ".py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.set_num_threads({threads})
    return module
world = load("conftest").World()
print(json.dumps(load("test_fold").trajectory(world)))
"""


def test_the_trajectory_does_not_depend_on_threads_or_vector_units():
    text = AGAIN.format(threads=2, folder=str(Path(__file__).parent))
    env = dict(os.environ) | {"ATEN_CPU_CAPABILITY": "default"}
    root = Path(__file__).parents[4]
    done = subprocess.run([sys.executable, "-c", text], env=env, check=True, capture_output=True, cwd=root)
    assert json.loads(done.stdout) == json.loads(GOLDEN.read_text())


class Shelf:
    """`world.onto` that can lose payloads, and counts."""

    def __init__(self, world):
        self.world, self.gone, self.asked = world, set(), 0

    def onto(self, fresh, theta):
        self.asked += 1
        if any(part.path in self.gone for part in fresh.members):
            raise CorruptFault("gone")
        return self.world.onto(fresh, theta)

    def fold(self):
        return DirectFold(self.world.theta, self.world.arena, self.onto, lambda _: self.world.cover)


def test_a_set_is_replaced_when_payloads_of_the_older_one_are_gone(world):
    shelf = Shelf(world)
    fold = shelf.fold()
    sets = {0: [0, 1], 1: [2, 3], 2: [4], 3: [5, 0]}
    for number, salts in sets.items():
        fold.set_round(number, parts(world, salts))
    shelf.gone = {world.part(3).path}
    fold.set_round(1, parts(world, [2, 5]))
    assert fold.view_digest() == reference(world, sets | {1: [2, 5]})
    before = fold.view_digest()
    with pytest.raises(CorruptFault):
        fold.set_round(2, parts(world, [3]))
    assert fold.view_digest() == before


@pytest.mark.parametrize("rounds", [2, 4])
def test_a_set_is_replaced_when_a_payload_of_another_open_round_is_gone(world, rounds):
    shelf = Shelf(world)
    fold = shelf.fold()
    sets = {number: [number, number + 1] for number in range(rounds)}
    for number, salts in sets.items():
        fold.set_round(number, parts(world, salts))
    shelf.gone = {world.part(0).path}
    fold.set_round(1, parts(world, [1, 2, 5]))
    assert fold.view_digest() == reference(world, sets | {1: [1, 2, 5]})


def test_a_round_that_becomes_final_as_the_view_has_it_is_not_folded_again(world):
    shelf = Shelf(world)
    fold = shelf.fold()
    for number in range(3):
        fold.set_round(number, parts(world, [number, number + 1]))
        asked = shelf.asked
        digest = fold.check(number, parts(world, [number + 1, number]))
        assert fold.finalize(number, parts(world, [number, number + 1])) == digest == fold.view_digest()
        assert shelf.asked == asked
    assert fold.state_digest() == reference(world, {number: [number, number + 1] for number in range(3)})


def fragment_world(world):
    """A fold of rounds that take turns with two halves of the arena, and the same sums taken plainly."""
    chunks = world.arena.chunks
    middle = chunks // 2
    covers = ((Span(0, 1), Span(middle, chunks)), (Span(1, middle),))

    def update(members, size):
        steps = [3 + 2 * at + len(members) if members else 0 for at in range(size)]
        return torch.tensor(steps, dtype=torch.int32)[:, None].repeat(1, 4096)

    def onto(fresh, theta):
        return plus(theta, update(fresh.members, len(theta)))

    fold = DirectFold(world.theta, world.arena, onto, lambda number: covers[number % 2])
    return fold, covers, update


def plain_sum(world, covers, update, sets):
    total = world.theta.clone()
    for number, salts in sets.items():
        whole = torch.zeros_like(total)
        rows = [chunk for span in covers[number % 2] for chunk in range(span.start, span.stop)]
        whole[rows] = update([None] * len(salts), len(rows))
        total += clear(whole, padding_of(world.arena))
    return clear(total, padding_of(world.arena))


def test_a_round_moves_the_rows_of_its_cover_and_no_others(world):
    fold, covers, _ = fragment_world(world)
    before = fold.view_C4096.clone()
    for number in (0, 1):
        fold.set_round(number, parts(world, [0, 1]))
        others = [chunk for span in covers[1 - number] for chunk in range(span.start, span.stop)]
        assert torch.equal(fold.view_C4096[others], before[others])
        assert not torch.equal(fold.view_C4096, before)
        fold.set_round(number, [])
        assert torch.equal(fold.view_C4096, before)


@LAWS
@given(SETS, st.randoms(use_true_random=False))
def test_rounds_of_fragments_commute_are_replaced_and_become_final(world, sets, random):
    fold, covers, update = fragment_world(world)
    sets = {number: sets.get(number, frozenset()) for number in range(3)}
    steps = [(number, size) for number, salts in sets.items() for size in range(len(salts) + 1)]
    random.shuffle(steps)
    for number, size in steps:
        fold.set_round(number, parts(world, sorted(sets[number])[:size]))
    for number, salts in sets.items():
        fold.set_round(number, parts(world, salts))
    expected = plain_sum(world, covers, update, sets)
    assert torch.equal(fold.view_C4096, expected)
    for number, salts in sets.items():
        assert fold.check(number, parts(world, salts)) == fold.finalize(number, parts(world, salts))
    assert torch.equal(fold.view_C4096, expected)


def test_a_round_is_held_from_its_first_set_on(world):
    fold = world.fold()
    assert [fold.holds(number) for number in (-1, 0, 1)] == [True, False, False]
    fold.set_round(1, [])
    assert [fold.holds(number) for number in (-1, 0, 1)] == [True, False, True]
    fold.finalize(0, [])
    fold.adopt(fold.final_C4096, 0)
    assert [fold.holds(number) for number in (0, 1)] == [True, False]
