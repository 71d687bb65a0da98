"""The average of final states: the formula in exact integers, gaps, and nothing where none is asked for."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.learning.outer.average import StateAverage
from atoll.protocols.run.arena import CHUNK


def states(values):
    """One state for each value, with some spread over the rows."""
    offset = torch.arange(3, dtype=torch.int32)[:, None].expand(3, CHUNK)
    return [(offset + value).contiguous() for value in values]


def nearest(numerator, denominator):
    """Halves up."""
    return (2 * numerator + denominator) // (2 * denominator)


@given(st.lists(st.integers(-(1 << 31), (1 << 31) - 4), min_size=1, max_size=6), st.integers(1, 1 << 16))
def test_it_is_the_formula_in_exact_integers(values, rounds):
    average, expected = StateAverage(rounds), values[0]
    for number, state in enumerate(states(values)):
        average.add(state, number)
        expected += nearest(values[number] - expected, rounds)
        assert average.values_C4096[0].eq(expected).all()
        assert average.values_C4096[2].eq(expected + 2).all()


def test_golden_values_of_four_rounds():
    average = StateAverage(4)
    seen = []
    for number, state in enumerate(states([0, 100, 100, -50])):
        average.add(state, number)
        seen.append(int(average.values_C4096[0, 0]))
    assert seen == [0, 25, 44, 21]


def test_the_same_round_again_changes_nothing_and_a_gap_begins_anew():
    average = StateAverage(2)
    first, second, far = states([10, 20, 1000])
    average.add(first, 4)
    average.add(second, 5)
    average.add(second, 5)
    assert int(average.values_C4096[0, 0]) == 15
    average.add(far, 9)
    assert torch.equal(average.values_C4096, far)
    average.add(first, 3)
    assert torch.equal(average.values_C4096, first)


def test_an_average_that_was_saved_is_never_changed():
    average = StateAverage(2)
    first, second = states([10, 20])
    average.load(first, 0)
    average.add(second, 1)
    assert torch.equal(first, states([10])[0])
    assert not torch.equal(average.values_C4096, first)


def test_without_rounds_there_is_none():
    average = StateAverage()
    average.add(states([1])[0], 0)
    average.load(states([1])[0], 0)
    assert average.values_C4096 is None


@pytest.mark.parametrize("rounds", [1, 3, 8])
def test_it_comes_as_near_as_rounding_allows(rounds):
    average = StateAverage(rounds)
    start, goal = states([0, 1 << 20])
    average.add(start, 0)
    for number in range(1, 40 * rounds):
        average.add(goal, number)
    assert abs(Fraction(int(average.values_C4096[0, 0]) - (1 << 20))) <= Fraction(rounds, 2)
