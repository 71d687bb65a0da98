"""The dynamic program against every choice there is, and the median."""

import random
from itertools import product

import numpy as np
import pytest

from atoll.node.worker.sizes.program import chosen, linear, median_errors
from atoll.protocols.run.sized_payload import SizedLayout, part_bytes

KS = (16, 64, 256)


def layout_of(chunks_T):
    return SizedLayout(chunks_T, KS, 64, True)


def worlds():
    rng = random.Random(5)
    for _ in range(60):
        chunks_T = tuple(rng.choice((1, 2, 7)) for _ in range(4))
        logs = [sorted((rng.randrange(32000, 32400) for _ in KS), reverse=True) for _ in chunks_T]
        yield layout_of(chunks_T), np.array(logs, np.int64)


def cost(layout, errors_TK, k_T):
    numbers = [KS.index(k) for k in k_T]
    size_bytes = sum(part_bytes(chunks, k) for chunks, k in zip(layout.chunks_T, k_T, strict=True))
    return size_bytes, sum(errors_K[at] for errors_K, at in zip(errors_TK, numbers, strict=True))


@pytest.mark.parametrize("goal", ["bytes", "error"])
def test_the_choice_keeps_its_bound_and_is_the_best_but_for_the_grid(goal):
    better = 0
    for layout, logs_TK in worlds():
        errors_TK = linear(logs_TK)
        every = [cost(layout, errors_TK, k_T) for k_T in product(KS, repeat=len(layout.chunks_T))]
        most_bytes, most_error = cost(layout, errors_TK, (64,) * len(layout.chunks_T))
        size_bytes, error = cost(layout, errors_TK, chosen(logs_TK, layout, goal))
        assert size_bytes <= most_bytes
        assert error <= most_error
        if goal == "bytes":
            assert size_bytes <= min(size for size, other in every if other <= 0.999 * most_error)
        else:
            assert error <= 1.001 * min(other for size, other in every if size <= most_bytes)
        better += (size_bytes, error) != (most_bytes, most_error)
    assert better > 20


def test_errors_are_one_whole_unit_and_the_largest_has_forty_bits():
    found = linear(np.array([[32768, 32752, 32760, 0]], np.int64))
    assert found == [[1 << 40, 1 << 39, found[0][2], 0]]
    assert found[0][2] / 2**40 == pytest.approx(2**-0.5, rel=1e-4)


def test_where_all_is_said_to_be_sent_the_uniform_choice_stays():
    layout = layout_of((1, 2))
    nothing = np.array([[0, 0, 0], [0, 0, 0]], np.int64)
    lies = np.array([[65535, 0, 0], [65535, 0, 0]], np.int64)
    for logs_TK in (lies, np.array([[9, 9, 65535], [9, 9, 65535]], np.int64), nothing):
        size_bytes, _ = cost(layout, linear(logs_TK), chosen(logs_TK, layout, "bytes"))
        assert size_bytes <= sum(part_bytes(chunks, 64) for chunks in layout.chunks_T)


def test_the_median_is_the_lower_one_and_half_must_lie_to_move_it():
    honest = [[[500, 400, 300]], [[500, 400, 300]]]
    for lie in (0, 65535):
        liars = [[[lie] * 3]]
        assert median_errors([*honest, *liars]).tolist() == [[500, 400, 300]]
    assert median_errors([[[9, 8, 7]], [[5, 4, 3]]]).tolist() == [[5, 4, 3]]
