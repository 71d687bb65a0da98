"""`atoll bench heal`: what a side brings along is what the worker keeps; rows show the worst seed."""

import pytest
import torch

from atoll_bench.heal.heal import Heal, rows_of
from atoll_bench.heal.sides import ALONE, SHIPPED, WAYS, Length, Side, outcome

FEEDBACK = 0.95


@pytest.fixture(scope="module")
def sides(data):
    """Seven and three members, two rounds after one together."""
    together = Side(data, 1, Length(1, 2, 1), FEEDBACK).run(0, 1)
    kept = together._residual_MC4096.clone()
    larger, smaller = (together.part(slots).run(1, 2) for slots in (range(7), range(7, 10)))
    assert torch.equal(together._residual_MC4096, kept), "a part is a copy"
    return larger, smaller


def test_both_go_on_from_the_model_of_the_larger_side(sides):
    larger, smaller = sides
    both = larger.joined(smaller, WAYS[SHIPPED])
    assert both.slots == list(range(10))
    assert torch.equal(both.theta_C4096, larger.theta_C4096)
    assert torch.equal(both._residual_MC4096[:7], larger._residual_MC4096)
    assert not torch.equal(smaller.theta_C4096, larger.theta_C4096)
    before = both._residual_MC4096.clone()
    both.part(range(7)).run(3, 1)
    assert torch.equal(both._residual_MC4096, before)


MEAN = (1 - FEEDBACK) / (1 - FEEDBACK**128)
"""One over the sum of β^age over the payloads that are kept."""


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        (SHIPPED, (MEAN * FEEDBACK, MEAN)),
        ("returned decayed", (FEEDBACK, 1.0)),
        ("returned whole", (1.0, 1.0)),
    ],
)
def test_own_payloads_return(sides, name, shares):
    larger, smaller = sides
    assert smaller.spec.compress.feedback == FEEDBACK
    found = larger.joined(smaller, WAYS[name])._residual_MC4096[7:]
    for slot in range(3):
        owed = smaller._residual_MC4096[slot] + sum(
            share * smaller._values(sent[slot]) for share, sent in zip(shares, smaller.sent, strict=True)
        )
        assert torch.allclose(found[slot], owed, atol=1e-6)


def test_a_side_that_begins_anew_has_nothing(sides):
    larger, smaller = sides
    assert not larger.joined(smaller, WAYS["begins anew"])._residual_MC4096[7:].any()
    kept = larger.joined(smaller, WAYS["keeps error feedback"])
    assert torch.equal(kept._residual_MC4096[7:], smaller._residual_MC4096)


def test_an_outcome_has_a_loss_for_each_way(data):
    found = outcome(data, 1, Length(1, 2, 1), 5, FEEDBACK)
    assert found.keys() == {*ALONE, *WAYS}
    assert len(set(found.values())) == len(found)
    assert max(found.values()) < 9


def test_rows_show_the_worst_seed_against_the_better_side():
    alone = dict(zip(ALONE, (3.0, 3.1), strict=True))
    losses = dict.fromkeys(WAYS, 3.05)
    found = {
        Heal(0.5, 5, 3, 1): alone | losses | {SHIPPED: 2.9},
        Heal(0.5, 5, 3, 2): alone | losses | {SHIPPED: 3.01},
        Heal(0.95, 20, 5, 1): dict(zip(ALONE, (3.1, 3.0), strict=True)) | losses | {SHIPPED: 2.99},
    }
    rows = {row.metric: row for row in rows_of(found)}
    assert len(rows) == 2 * len(WAYS)
    worst = rows[f"β 0.5, 5 rounds, 70/30: {SHIPPED}"]
    assert worst.value == pytest.approx(0.01)
    assert (worst.passed, worst.note) == (False, "seeds -0.1000, +0.0100")
    assert rows[f"β 0.95, 20 rounds, 50/50: {SHIPPED}"].passed
    assert rows["β 0.5, 5 rounds, 70/30: begins anew"].bar is None
