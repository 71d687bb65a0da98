"""What a soak may say: a leak that is planted is found, and what is too short says nothing."""

import random

import pytest

from tests.chaos.growth import LEAST_S, Sample, Slope, slope, student, verdict

WARM_S, ROUND_S = 300.0, 10.0
WARM = int(WARM_S / ROUND_S)


def samples(per_h, seconds, noise=0.0, seed=1, lives=1, round_s=ROUND_S):
    """Every 5 s; each life begins 40 lower and gets warm in as many rounds."""
    rng, found = random.Random(seed), []
    for life in range(lives):
        for at in range(int(life * seconds), int((life + 1) * seconds), 5):
            age = at - life * seconds
            warmth = 40.0 * min(1.0, age / round_s / WARM)
            value = 100.0 + warmth + per_h * age / 3600 + rng.gauss(0.0, noise)
            found.append(Sample(float(at), 0, (life,), int(at / round_s), {"memory": value}))
    return found


def test_a_leak_is_measured_exactly_where_there_is_no_noise():
    found = slope(samples(7.2, 3600), "memory", WARM)
    assert found.per_h == pytest.approx(7.2)
    assert found.error == pytest.approx(0.0, abs=1e-6)
    assert found.measured_s == pytest.approx(3600 - WARM_S, abs=10)


@pytest.mark.parametrize("round_s", [5.0, ROUND_S, 30.0])
def test_the_warm_up_is_no_growth_however_long_its_rounds_take(round_s):
    found = slope(samples(0.0, 3600, round_s=round_s), "memory", WARM)
    assert abs(found.per_h) < 1e-6
    assert found.measured_s == pytest.approx(3600 - WARM * round_s, abs=10)
    assert slope(samples(0.0, 3600, round_s=round_s), "memory", 0).per_h > 3


def test_a_life_that_begins_again_is_no_growth_and_hides_none():
    assert slope(samples(0.0, 1200, lives=4), "memory", WARM).per_h == pytest.approx(0.0, abs=1e-6)
    assert slope(samples(5.0, 1200, lives=4), "memory", WARM).per_h == pytest.approx(5.0)


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    hits = 0
    for seed in range(200):
        found = slope(samples(1.0, 3600, noise=3.0, seed=seed), "memory", WARM)
        hits += abs(found.per_h - 1.0) <= found.error
    assert 180 <= hits <= 199


@pytest.mark.parametrize(
    ("per_h", "seconds", "noise", "said"),
    [
        (0.1, 3600, 0.5, "flat"),
        (6.0, 3600, 0.5, "grows"),
        (2.0, 3600, 5.0, "unsure"),
        (0.0, 1200, 0.0, "unsure"),
        (600.0, 900, 0.5, "grows"),
        (0.0, 200, 0.0, "unsure"),
    ],
)
def test_what_is_said_of_a_growth(per_h, seconds, noise, said):
    assert slope(samples(per_h, seconds, noise), "memory", WARM).said(2.0) == said


def test_nothing_passes_that_was_measured_for_minutes():
    assert Slope(0.0, 0.1, LEAST_S).said(2.0) == "flat"
    assert Slope(0.0, 0.1, LEAST_S - 1).said(2.0) == "unsure"


def test_the_whole_interval_is_on_one_side_of_the_bar():
    assert [Slope(at, 1.0, LEAST_S).said(2.0) for at in (0.5, 1.5, 2.5, 3.5)] == [
        "flat",
        "unsure",
        "unsure",
        "grows",
    ]


def test_one_node_is_enough():
    assert verdict(["flat", "unsure", "grows"]) == "grows"
    assert verdict(["flat", "unsure"]) == "unsure"
    assert verdict(["flat", "flat"]) == "flat"
    assert verdict([]) == "unsure"


@pytest.mark.parametrize(("free", "table"), [(1, 12.706), (3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042)])
def test_quantiles_are_those_of_the_table(free, table):
    assert student(free) == pytest.approx(table, rel=0.01)
