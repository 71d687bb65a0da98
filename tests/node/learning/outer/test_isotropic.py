"""IsoLoCo's mean: against numpy's SVD, exact on the way, on a quadratic, and as a function of the set alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node.learning.outer import isotropic as product
from atoll.node.learning.outer.fixed import state_digest
from atoll.node.learning.outer.isotropic import flattened, isotropic
from atoll.protocols.errors import Divergence
from atoll.protocols.run.arena import CHUNK, Span, arena_of
from tests.node.learning.outer.conftest import MODEL, pattern

ARENA = arena_of(MODEL)
WHOLE = (Span(0, ARENA.chunks),)
GOLDEN = "da1302eea6892f27976800e26431d77798fcb7fae0bfa866e39e83989a5e7994"
"""State digest after three rounds; changes only with the arithmetic, which needs a new name."""


def matrix(shape, scale, seed=1):
    return np.rint(np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.int64)


def by_svd(delta_MN):
    u, s, vt = np.linalg.svd(delta_MN.astype(float), full_matrices=False)
    return s.mean() * (u @ vt)


@pytest.mark.parametrize("shape", [(64, 96), (96, 64), (40, 70), (1, 9), (256, 64)])
@pytest.mark.parametrize("scale", [1e3, 1e6, 5e7])
def test_singular_values_become_their_mean_and_vectors_stay(shape, scale):
    delta = matrix(shape, scale)
    found, wanted = flattened(delta), by_svd(delta)
    assert np.linalg.norm(found - wanted) <= 1e-3 * np.linalg.norm(wanted)
    assert np.linalg.norm(found) <= np.linalg.norm(delta) * (1 + 1e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 28), st.integers(0, 2**32))
def test_a_mirrored_or_turned_mean_gives_the_mirrored_or_turned_step(rows, cols, bits, seed):
    delta = np.random.default_rng(seed).integers(-(1 << bits), (1 << bits) + 1, (rows, cols))
    found = flattened(delta)
    assert np.array_equal(flattened(-delta), -found)
    if rows != cols:  # a square matrix is turned by other products, which are rounded elsewhere
        assert np.array_equal(flattened(delta.T), found.T)


def test_all_numbers_on_the_way_are_whole_and_below_what_float64_holds(monkeypatch):
    """So the order of a sum cannot show: its parts are whole, and no sum of magnitudes comes near 2⁵³."""
    seen = []

    def watched(left, right):
        for each in (left, right):
            assert np.array_equal(each, np.rint(each))
        seen.append(float((np.abs(left) @ np.abs(right)).max()))
        found = product_of(left, right)
        # Any order gives these bits: here the one in which the middle is split and turned round.
        half = left.shape[1] // 2
        again = left[:, half:][:, ::-1] @ right[half:][::-1] + left[:, :half] @ right[:half]
        assert np.array_equal(found, np.rint(again * 2.0**-22))
        return found

    product_of = product._product
    monkeypatch.setattr(product, "_product", watched)
    for delta in (matrix((64, 200), 1e6), np.outer(matrix(48, 900.0), matrix(80, 900.0)), np.eye(64, dtype=int)):
        flattened(delta)
    assert len(seen) == 3 * 2 * len(product.STEPS) + 3 * len(product.STEPS)
    assert max(seen) < 2**53


def test_nothing_and_one_value_are_no_special_cases():
    assert not flattened(np.zeros((3, 5), np.int64)).any()
    one = np.zeros((3, 5), np.int64)
    one[1, 2] = 3000
    assert np.abs(flattened(one) - one // 3).max() <= 1
    assert flattened(np.array([[7]])).tolist() == [[7]]


def test_a_step_beyond_the_range_is_divergence():
    theta = torch.full((ARENA.chunks, CHUNK), 2**31 - 2**10, dtype=torch.int32)
    moved = theta - (pattern(ARENA.chunks, 3) * 2**26).to(torch.int32).abs()
    with pytest.raises(Divergence, match="left its range"):
        isotropic(moved, theta, ARENA, WHOLE)


def values(rows, place):
    return product._matrix(rows[place.first_chunk :][: place.blocks[0] * place.blocks[1]], place)


def test_every_matrix_of_the_cover_is_made_isotropic_and_nothing_else():
    theta = (pattern(ARENA.chunks, 1) * 2**24).to(torch.int32)
    moved = theta + (pattern(ARENA.chunks, 2) * 2**16).to(torch.int32)
    before = moved.clone()
    isotropic(moved, theta, ARENA, WHOLE)
    for place in ARENA.placements:
        if len(place.shape) == 2:
            wanted = flattened(values(before, place) - values(theta, place))
            assert np.array_equal(values(moved, place) - values(theta, place), wanted)
            continue
        rows = slice(place.first_chunk, ARENA.chunks)
        assert torch.equal(moved[rows], before[rows])


def test_a_fragment_gives_what_its_matrices_have_in_the_whole():
    theta = (pattern(ARENA.chunks, 1) * 2**24).to(torch.int32)
    step = (pattern(ARENA.chunks, 2) * 2**16).to(torch.int32)
    whole = theta + step
    isotropic(whole, theta, ARENA, WHOLE)
    places = [place for place in ARENA.placements if len(place.shape) == 2]
    cut = places[2].first_chunk
    cover = (Span(0, 1), Span(cut, ARENA.chunks))
    rows = [0, *range(cut, ARENA.chunks)]
    part = theta[rows] + step[rows]
    isotropic(part, theta[rows], ARENA, cover)
    assert torch.equal(part[1:], whole[cut:])
    if places[0].blocks != (1, 1):
        assert torch.equal(part[0], (theta + step)[0]), "a matrix that is not there whole keeps its mean"


def rounds(count, share=4):
    """Θ after rounds towards a target, by isotropic steps that fall."""
    target = (pattern(ARENA.chunks, 5) * 2**22).to(torch.int32)
    theta = torch.zeros_like(target)
    for number in range(count):
        mean = (target - theta).double() / share * (1 - number / count)
        moved = theta + mean.round().to(torch.int32)
        isotropic(moved, theta, ARENA, WHOLE)
        theta = moved
    return theta, target


def test_on_a_quadratic_theta_comes_to_the_least_point_and_stays():
    theta, target = rounds(400)
    place = next(place for place in ARENA.placements if len(place.shape) == 2)
    far = np.abs(values(theta, place) - values(target, place))
    assert np.sqrt((far**2).mean()) <= 0.02 * np.sqrt((values(target, place).astype(float) ** 2).mean())
    moved = target.clone()
    isotropic(moved, target, ARENA, WHOLE)
    assert torch.equal(moved, target)


def test_the_golden_trajectory():
    assert state_digest(rounds(3)[0]).hex() == GOLDEN
