"""Attackers of `atoll bench byzantine` that know the rule: what they find is worse than what they began from."""

import pytest
import torch

from atoll.node.learning.compress.folding import decode
from atoll_bench.byzantine.adaptive import ADAPTIVE, GRID, HALVINGS, distance, lost_progress, strongest
from atoll_bench.byzantine.attacks import ATTACKS
from atoll_bench.byzantine.trial import MEMBERS, Case, Trial

PARENTS = {
    "adaptive mean": ("IPM 0.5", "IPM 3", "min-max"),
    "adaptive deviation": ("ALIE",),
    "adaptive own": ("sign flip", "scaling"),
}
PARENTS["adaptive progress"] = tuple(parent for parents in PARENTS.values() for parent in parents)
HARMS = dict.fromkeys(ADAPTIVE, distance) | {"adaptive progress": lost_progress}
LIARS = 2


@pytest.fixture(scope="module")
def sent(data):
    """What ten members send in the first round, the last of whom lie."""
    return Trial(Case("mean", "sign flip", LIARS), data)._train(0)


def seen_with(rule, sent, data):
    trial = Trial(Case(rule, "sign flip", LIARS), data)
    return trial, trial.seen(0, sent[: MEMBERS - LIARS], sent)


RULES = ("mean", "clip", "nnm", "krum", "rfa", "cclip", "flag")
SLICE = dict(zip(ADAPTIVE, ("clip", "nnm", "mean", "flag"), strict=True))
"""Of each attack a rule, in `make test`: the search is the same code for all."""
SLOW_MORE = pytest.mark.slow(slice="test_somewhere_the_search_finds_more_than_any_of_them")
SLOW = pytest.mark.slow(slice="test_what_is_found_does_as_much_harm_as_each_attack_that_it_comes_from")


@pytest.mark.parametrize(
    ("name", "rule"),
    [pytest.param(name, rule, marks=() if SLICE[name] == rule else SLOW) for name in ADAPTIVE for rule in RULES],
)
def test_what_is_found_does_as_much_harm_as_each_attack_that_it_comes_from(rule, name, sent, data):
    _, seen = seen_with(rule, sent, data)
    found = HARMS[name](ADAPTIVE[name](seen), seen)
    for parent in PARENTS[name]:
        # the codec rounds: the same strength reached by other sums gives other units
        assert found >= 0.995 * HARMS[name](ATTACKS[parent](seen), seen), parent


@pytest.mark.parametrize(
    ("rule", "times"),
    [pytest.param("mean", 2.0, marks=SLOW_MORE), ("nnm", 1.05), pytest.param("flag", 1.05, marks=SLOW_MORE)],
)
def test_somewhere_the_search_finds_more_than_any_of_them(rule, times, sent, data):
    _, seen = seen_with(rule, sent, data)
    fixed = max(distance(ATTACKS[parent](seen), seen) for parent in PARENTS["adaptive progress"])
    found = max(distance(attack(seen), seen) for attack in ADAPTIVE.values())
    assert found >= times * fixed


def test_what_is_found_is_the_same_again(sent, data):
    lies = [ADAPTIVE["adaptive mean"](seen_with("nnm", sent, data)[1]) for _ in range(2)]
    assert torch.equal(*lies)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_lies_travel_as_legal_payloads_of_k_places_in_each_chunk(name, sent, data):
    trial, seen = seen_with("nnm", sent, data)
    for payload in trial._encoded(ADAPTIVE[name](seen)):
        trial._codec.check(payload, trial._arena.chunks)
        index, q = decode(payload, trial._codec.layout(trial._arena.chunks))
        assert index.shape == (trial._arena.chunks, trial.spec.compress.k)
        assert bool(q.any())


def test_the_fold_that_liars_try_is_the_one_of_the_round(sent, data):
    trial, seen = seen_with("nnm", sent, data)
    lies = ATTACKS["ALIE"](seen)
    payloads = [*sent[: MEMBERS - LIARS], *trial._encoded(lies)]
    moved = trial._folded(trial.theta_C4096, 0, payloads) - trial.theta_C4096
    assert torch.equal(moved.float() * 2.0**-24, seen.fold(lies))


def test_harm_is_a_distance_or_what_is_lost_of_the_honest_step(sent, data):
    _, seen = seen_with("mean", sent, data)
    honest = seen.honest_step_C4096
    for times, lost in ((1.0, 0.0), (0.0, 1.0), (-1.0, 2.0)):
        moved = seen._replace(fold=lambda lies, times=times: times * honest)
        assert lost_progress(seen.own_LC4096, moved) == pytest.approx(lost, abs=1e-5)
        assert distance(seen.own_LC4096, moved) == pytest.approx(lost * float(honest.norm()), rel=1e-5)


@pytest.mark.parametrize("peak", [0.31, 1.2, 5.3, 13.0])
def test_the_strength_with_most_harm_is_found_in_few_tries(peak):
    tries = []

    def harm(strength):
        tries.append(strength)
        return -abs(strength - peak)

    assert strongest(harm, GRID) == pytest.approx(peak, rel=0.05)
    assert len(tries) <= len(GRID) + 2 * HALVINGS


def test_of_strengths_with_equal_harm_the_first_is_taken():
    assert strongest(lambda strength: 1.0, GRID) == GRID[0]


def test_a_run_under_an_adaptive_attack_ends_worse_than_without(data):
    honest, attacked = (
        Trial(Case("mean", attack, liars), data).loss(3) for attack, liars in ((None, 0), ("adaptive own", 3))
    )
    assert attacked > honest * 1.05
