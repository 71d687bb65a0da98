"""What a long partition must show: tokens of both sides, and a loss below that of the better side alone."""

import pytest

from tests.chaos.accounts import Change
from tests.chaos.apart_cases import Compared, Heal, as_long, states_wanted, tokens_of
from tests.chaos.test_accounts import AUTHOR, WHOLE, contributed, home, saved, sets


@pytest.mark.parametrize(
    ("together", "alone", "holds"),
    [
        (2.0, (2.1, 2.2), True),
        (2.15, (2.1, 2.2), False),
        (2.1, (2.1, 2.2), False),
        (None, (2.1, 2.2), False),
        (2.0, (2.1, None), False),
    ],
)
def test_the_merged_run_is_compared_with_the_better_side(together, alone, holds):
    assert Compared(together, alone).holds is holds


def test_a_loss_that_is_not_known_is_said():
    assert str(Compared(2.0, (2.125, None))) == (
        "loss 10 rounds later 2.0000 bits per byte, each side alone 2.1250, unknown"
    )


def test_the_work_of_each_side_since_the_cut_is_counted_until_the_newest_that_was_made_before_the_heal():
    before = home(
        rows=sets({0: True, 1: True}), entries=contributed(range(4)), saved=saved(1, {0: WHOLE, 1: WHOLE})
    )
    later = sets({0: True, 1: False, 2: False, 3: True, 4: True, 5: True})
    past = {0: WHOLE, 1: (), 2: (), 3: WHOLE, 4: WHOLE, 5: WHOLE}
    after = home(rows=later, entries=contributed(range(6)), saved=saved(5, past))
    heal = Heal(0, 0.0, [before, before], (range(1), range(1, 2)))
    told, lost = tokens_of([after, after], {AUTHOR.peer_id: [Change(1, 0)]}, heal)
    side = "1 nodes: of 30 tokens 10 folded, 20 in error feedback, 0 too old for it, 0 contributions lost"
    assert (told, lost) == (f"{side}; {side}", [])
    assert heal.begun(range(1)) == 3


def test_states_are_taken_around_the_round_that_is_compared_whichever_side_wins():
    wanted = states_wanted([100, 104])
    assert {100 + 10, 104 + 10} <= set(wanted)
    assert (wanted.start, wanted.stop) == (107, 118)


@pytest.mark.parametrize(
    ("lacking", "expected"),
    [(set(), 13), ({5}, 14), ({5, 6}, 14), ({5, 6, 7}, 15), (set(range(4, 20)), -1)],
)
def test_a_side_alone_gets_the_contributions_that_its_start_cost_it(lacking, expected):
    """Two members; rounds up to 3 were begun at the heal; a round may lack one of them."""
    rows = sets({at: at not in lacking for at in range(20)})
    assert as_long([home(rows=rows, entries=(), saved=None)], 3, 2) == expected
