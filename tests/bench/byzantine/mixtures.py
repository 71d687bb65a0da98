"""Members whose data differ: a mixture of classes for each, and the windows that it reads (Hsu et al., 2019).

The text of the bench is the works of Shakespeare one after the other: a work is a class, and a window belongs to
the work in which it begins. Each member's mixture is one draw of Dirichlet(α · p), with p the works' shares of the
text (arXiv 1909.06335): α is the concentration of all classes together, 0 gives each member one work, ∞ gives all
the whole text. Windows are then dealt without being put back, so no two members read the same one.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atoll.node.learning.data.shakespeare import VALIDATION, archive_bytes, read_archive
from atoll.node.learning.kernels.compiled import Ints

_BETWEEN = 2
"""Bytes between two works: a blank line."""


def works_of_windows(cache: Path, num_windows: int, context: int) -> Ints:
    """int64 `[W]`: number of the work in which each training window begins. Raises Unreachable, DiskFault.

    For the tokenizer `bytes` alone: places in the text are places among the tokens.
    """
    works = sorted(read_archive(archive_bytes(cache)).items())
    return classes([len(text) + _BETWEEN for name, text in works if name not in VALIDATION], num_windows, context)


def classes(tokens_K: list[int], num_windows: int, context: int) -> Ints:
    """int64 `[W]`: in which of consecutive parts of so many tokens each window begins."""
    ends_K = np.cumsum(tokens_K)
    found: Ints = np.searchsorted(ends_K, np.arange(num_windows) * context, side="right").astype(np.int64)
    return found


def mixtures(alpha: float, class_W: Ints, members: int, seed: int) -> NDArray[np.float64]:
    """`[M, K]`: the share of each class in what a member reads; rows sum to 1. A pure function."""
    share_K = np.bincount(class_W) / len(class_W)
    return np.random.default_rng([seed, 1]).dirichlet(alpha * share_K, members)


def dealt(mixture_MK: NDArray[np.float64], class_W: Ints, each: int, seed: int) -> Ints:
    """int64 `[M, each]`: windows of each member in its order. A pure function.

    Members take turns of one window. A class that is used up is left out; a member that has no other one takes
    what is left, by its size. Raises ValueError where there are too few windows.
    """
    members, rng = len(mixture_MK), np.random.default_rng([seed, 2])
    if members * each > len(class_W):
        raise ValueError(f"{len(class_W)} windows are too few for {members} members with {each} each")
    order = [list(rng.permutation(np.flatnonzero(class_W == number))) for number in range(mixture_MK.shape[1])]
    left_K = np.array([len(windows) for windows in order])
    found = np.empty((members, each), np.int64)
    for turn in range(each):
        for member in range(members):
            wanted_K = mixture_MK[member] * (left_K > 0)
            share_K = wanted_K if wanted_K.sum() > 0 else left_K.astype(np.float64)
            rising_K = np.cumsum(share_K)
            drawn = int(np.searchsorted(rising_K, rng.random() * rising_K[-1], side="right"))
            found[member, turn] = order[drawn].pop()
            left_K[drawn] -= 1
    return found
