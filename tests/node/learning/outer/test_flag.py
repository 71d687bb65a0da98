"""The Flag Aggregator beside the published formulas by singular values; the bits that all nodes share."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy._core._multiarray_umath import __cpu_dispatch__

from atoll.node.learning.outer import judging
from atoll.node.learning.outer.flag import STEPS, eigen, flag_shares
from atoll.node.learning.outer.judging import FLAG_MOST, cosines, flag, rfa

ONE = 1 << 30


def vectors(count, seed, liars=0, shared=0.6):
    """Unit vectors of 300 values that share a direction; the last ones have it backwards."""
    rng = np.random.default_rng(seed)
    common = rng.standard_normal(300)
    found = shared * common + rng.standard_normal((count, 300))
    found[count - liars :] -= 2 * shared * common
    return found / np.linalg.norm(found, axis=1)[:, None]


def published(unit_ND):
    """The update of the paper's formulas, with Y from the singular value decomposition of the weighted vectors."""
    count = len(unit_ND)
    size = -(-(count + 1) // 2)
    weight_N = np.ones(count)
    for _ in range(STEPS):
        basis_DM = np.linalg.svd((weight_N[:, None] * unit_ND).T, full_matrices=False)[0][:, :size]
        explained_N = ((unit_ND @ basis_DM) ** 2).sum(axis=1)
        weight_N = (np.abs(1 - explained_N) + 1e-7) ** -0.25
    return basis_DM @ (basis_DM.T @ unit_ND.sum(axis=0))


@pytest.mark.parametrize("count", [3, 4, 7, 10, 21, 40])
@pytest.mark.parametrize("seed", range(3))
def test_the_update_is_the_papers(count, seed):
    unit_ND = vectors(count, seed)
    share_N = flag_shares(np.floor(unit_ND @ unit_ND.T * ONE).astype(np.int64), ONE)
    wanted, found = published(unit_ND), share_N @ unit_ND
    # The paper's shares may be a little below 0.
    assert wanted @ found / np.linalg.norm(wanted) / np.linalg.norm(found) > 0.99


def test_a_share_is_the_papers_to_the_last_unit_where_none_is_below_0():
    unit_ND = vectors(9, 4)
    share_N = flag_shares(np.floor(unit_ND @ unit_ND.T * ONE).astype(np.int64), ONE)
    assert share_N.min() > 0
    wanted_N = np.linalg.lstsq(unit_ND.T, published(unit_ND), rcond=None)[0]
    assert np.abs(wanted_N / wanted_N.sum() * (1 << 15) - share_N).max() < 1.01


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 24), seed=st.integers(0, 1 << 20), rank=st.integers(1, 24), copies=st.integers(0, 4))
def test_eigenvectors_are_those_of_the_matrix(count, seed, rank, copies):
    """Also where eigenvalues are equal, and where many are 0."""
    row_ND = np.random.default_rng(seed).integers(-3, 4, (count, rank)).astype(np.float64)
    row_ND[: min(copies, count)] = row_ND[0]
    matrix = row_ND @ row_ND.T
    value_N, vector_NN = eigen(matrix)
    close = 1e-9 * max(1.0, float(np.abs(matrix).max()))
    assert np.allclose(vector_NN @ np.diag(value_N) @ vector_NN.T, matrix, atol=close)
    assert np.allclose(vector_NN.T @ vector_NN, np.eye(count), atol=1e-12)
    assert np.allclose(np.sort(value_N), np.linalg.eigvalsh(matrix), atol=close)


@pytest.mark.parametrize("liars", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_what_points_backwards_has_less_than_its_share(liars, seed):
    """It lies on the line of the others, which the subspace has; what is its own in it still counts."""
    unit_ND = vectors(10, seed, liars, shared=1.5)
    share_N = flag(cosines(np.round(unit_ND @ unit_ND.T * (1 << 40)).astype(np.int64), ONE), 2)
    assert share_N[10 - liars :].sum() < liars / 10 * share_N.sum()
    honest_D = unit_ND[: 10 - liars].sum(axis=0)
    update_D = share_N @ unit_ND
    assert honest_D @ update_D / np.linalg.norm(honest_D) / np.linalg.norm(update_D) > 0.8


BITS = """
import hashlib
import numpy as np
from atoll.node.learning.outer.judging import cosines, flag

found = hashlib.blake2b(digest_size=16)
for count in (1, 2, 3, 5, 8, 13, 40):
    row_ND = np.random.default_rng(count).integers(-99, 100, (count, 60))
    found.update(flag(cosines(row_ND @ row_ND.T, 1 << 30), 1).tobytes())
print(found.hexdigest())
"""


@pytest.mark.parametrize("disabled", ["", " ".join(__cpu_dispatch__)])
def test_the_bits_are_the_same_on_every_machine(disabled):
    """A golden digest, with all that this processor can and with the least: what differs somewhere forks a run."""
    done = subprocess.run(
        [sys.executable, "-c", BITS],
        env={**os.environ, "NPY_DISABLE_CPU_FEATURES": disabled}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "675be0098b060deb54e804aaf36851ff"


def test_more_groups_than_it_can_weigh_in_seconds_are_left_to_the_median(monkeypatch):
    gram = np.eye(FLAG_MOST + 1, dtype=np.int64) * ONE
    monkeypatch.setattr(judging, "flag_shares", lambda *_: pytest.fail("as many as that take minutes"))
    assert (flag(gram, 1) == rfa(gram, 1)).all()
