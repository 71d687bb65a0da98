"""Assignment of data: a permutation, disjoint between members, one place per (step, slot), without repeats."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node.learning.data.dataset import WindowPlace, permuted, windows

SEEDS = st.integers(0, 2**63 - 1)


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, size=st.integers(1, 3000))
def test_shuffled_is_a_permutation(seed, size):
    out = permuted(np.arange(size, dtype=np.uint64), seed, size)
    assert np.array_equal(np.sort(out), np.arange(size))


@settings(max_examples=60, deadline=None)
@given(
    seed=SEEDS, first=st.integers(0, 1 << 40), slots=st.integers(1, 8), steps=st.integers(1, 6),
    batch=st.integers(1, 8), extra=st.integers(0, 500),
)  # fmt: skip
def test_a_round_reads_no_window_twice_when_the_text_has_enough(seed, first, slots, steps, batch, extra):
    size = slots * steps * batch + extra
    read = [
        windows(WindowPlace(seed, first, s, slots, batch), i, size) for s in range(slots) for i in range(steps)
    ]
    assert len(np.unique(np.concatenate(read))) == slots * steps * batch


def test_an_epoch_reads_every_window_once_across_rounds_of_growing_length():
    size, slots, batch = 1200, 3, 4
    read, first = [], 0
    for steps in (1, 2, 4, 8, 16, 32, 37):
        read += [
            windows(WindowPlace(5, first, s, slots, batch), i, size) for s in range(slots) for i in range(steps)
        ]
        first += steps
    assert first * slots * batch == size
    assert np.array_equal(np.sort(np.concatenate(read)), np.arange(size))


def test_position_depends_on_the_step_only_not_on_how_rounds_cut_it():
    whole = [windows(WindowPlace(9, 0, 1, 4, 8), step, 10_000) for step in range(20)]
    resumed = [windows(WindowPlace(9, 13, 1, 4, 8), step, 10_000) for step in range(7)]
    assert np.array_equal(whole[13:], resumed)


def test_golden():
    assert windows(WindowPlace(1, 0, 0, 4, 8), 0, 37_804).tolist() == [
        17266,
        2334,
        35973,
        3716,
        6748,
        12156,
        19526,
        5634,
    ]
    assert windows(WindowPlace(1, 1000, 3, 4, 4), 5, 1 << 40).tolist() == [
        1014244730965,
        749994940240,
        287847861616,
        419541280979,
    ]


def test_seed_changes_the_order_and_the_order_is_not_the_texts():
    first = [windows(WindowPlace(seed, 0, 0, 1, 64), 0, 10_000) for seed in range(20)]
    assert len({tuple(w) for w in first}) == 20
    spread = np.concatenate(first) / 10_000
    assert abs(spread.mean() - 0.5) < 0.05
    assert abs(np.corrcoef(spread[:-1], spread[1:])[0, 1]) < 0.1
