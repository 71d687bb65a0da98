"""Members of `atoll bench byzantine` whose data differ: mixtures by Dirichlet, and the windows dealt by them."""

import numpy as np
import pytest

from atoll_bench.byzantine.mixtures import classes, dealt, mixtures
from atoll_bench.byzantine.trial import BATCH, MEMBERS, STEPS, Case, Trial

CLASS_W = np.repeat(np.arange(6), (40, 80, 120, 160, 200, 400)).astype(np.int64)
SHARE_K = np.bincount(CLASS_W) / len(CLASS_W)


def test_a_window_belongs_to_the_part_in_which_it_begins():
    assert classes([10, 3, 19], 8, 4).tolist() == [0, 0, 0, 1, 2, 2, 2, 2]


@pytest.mark.parametrize("alpha", [0.01, 0.5, 10.0, 1e6])
def test_mixtures_are_pure_and_each_is_a_whole(alpha):
    found = mixtures(alpha, CLASS_W, MEMBERS, 3)
    assert found.shape == (MEMBERS, 6)
    assert np.allclose(found.sum(axis=1), 1)
    assert (found >= 0).all()
    assert np.array_equal(found, mixtures(alpha, CLASS_W, MEMBERS, 3))
    assert not np.array_equal(found, mixtures(alpha, CLASS_W, MEMBERS, 4))


def test_large_alpha_gives_all_the_text_and_small_alpha_one_class():
    assert np.abs(mixtures(1e7, CLASS_W, 50, 1) - SHARE_K).max() < 0.01
    assert np.median(mixtures(1e-3, CLASS_W, 50, 1).max(axis=1)) > 0.99
    largest = [np.mean(mixtures(alpha, CLASS_W, 200, 1).max(axis=1)) for alpha in (0.1, 0.5, 2.0, 10.0, 100.0)]
    assert largest == sorted(largest, reverse=True)


def test_alpha_is_the_concentration_of_all_classes_together():
    """The variance of a share by Dirichlet(α · p) is p (1 − p) / (α + 1)."""
    found = mixtures(3.0, CLASS_W, 20_000, 1)
    assert np.allclose(found.var(axis=0), SHARE_K * (1 - SHARE_K) / 4.0, rtol=0.1)
    assert np.allclose(found.mean(axis=0), SHARE_K, atol=0.01)


@pytest.mark.parametrize("alpha", [0.01, 0.5, 1e6])
def test_the_whole_text_is_dealt_and_no_window_twice(alpha):
    found = dealt(mixtures(alpha, CLASS_W, 10, 2), CLASS_W, 100, 2)
    assert np.array_equal(np.sort(found.ravel()), np.arange(1000))
    assert np.array_equal(found, dealt(mixtures(alpha, CLASS_W, 10, 2), CLASS_W, 100, 2))
    with pytest.raises(ValueError, match="too few"):
        dealt(mixtures(alpha, CLASS_W, 10, 2), CLASS_W, 101, 2)


def test_members_read_what_their_mixture_says():
    wanted = mixtures(5.0, np.repeat(CLASS_W, 50), 4, 1)
    found = dealt(wanted, np.repeat(CLASS_W, 50), 2000, 1)
    for member in range(4):
        seen = np.bincount(np.repeat(CLASS_W, 50)[found[member]], minlength=6) / 2000
        assert np.abs(seen - wanted[member]).max() < 0.04


def test_a_member_with_one_class_reads_it_first_and_then_what_is_left():
    one = np.zeros((2, 6))
    one[:, 0] = 1.0
    found = dealt(one, CLASS_W, 50, 1)
    assert (CLASS_W[found[:, :20]] == 0).all()
    assert (CLASS_W[found[:, 20:]] != 0).all()


def test_unlike_members_of_a_trial_read_their_own_windows(data):
    class_W = classes([data.num_windows * data.context // 8] * 8 + [10**9], data.num_windows, data.context)
    trial = Trial(Case("mean", None, 0, dirichlet=0.01), data, class_W=class_W)
    mixture_MK = mixtures(0.01, class_W, MEMBERS, 1)
    for slot in range(MEMBERS):
        read = np.concatenate([trial._windows(number, step, slot) for number in (0, 1) for step in range(STEPS)])
        assert len(set(read.tolist())) == 2 * STEPS * BATCH
        usual = np.bincount(class_W[read], minlength=mixture_MK.shape[1]).argmax()
        assert usual == mixture_MK[slot].argmax()
    like = Trial(Case("mean", None, 0), data)
    assert not np.array_equal(like._windows(0, 0, 0), trial._windows(0, 0, 0))


def test_unlike_members_train(data):
    class_W = classes([data.num_windows * data.context // 2, 10**9], data.num_windows, data.context)
    losses = [Trial(Case("mean", None, 0, dirichlet=0.1), data, class_W=class_W).loss(2) for _ in range(2)]
    assert losses[0] == losses[1]
    assert losses[0] != Trial(Case("mean", None, 0), data).loss(2)
