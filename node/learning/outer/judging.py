"""Weights of contributions by how they lie to each other: a function of their inner products in integers.

First, groups of near copies count once: two are near where their cosine is above all but a few of the cosines of
the round. Then a rule gives each group a share, of the groups' means. A contribution has votes: one, or as many as
its weight. For medians, nnm and rfa one of n votes is like n contributions of one; others see each group once:

    nnm     each is mixed with its nearest others (Allouah et al., arXiv 2302.01772); then rfa of the mixtures
    krum    those with the nearest neighbours (multi-Krum; Blanchard et al., 2017)
    rfa     the smoothed geometric median in eight steps (Pillutla et al., arXiv 1912.13445)
    cclip   five steps towards the centre, each as long as the median distance at most (Karimireddy et al., 2021)
    flag    the subspace that most lie in: see `flag.py`

Sums are of int64 and have no order (those of `flag` have one). Roots and quotients of single numbers are float64,
which IEEE rounds the same way on every machine, and are rounded down at once. Ties go to the first in the given
order, which is the entries'.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from atoll.node.learning.kernels.compiled import Ints
from atoll.node.learning.outer.flag import flag_shares

Weigh = Callable[[Ints, int, Ints], Ints]
"""Shares int64 `[n]`, at most 2¹⁶, of inner products `[n, n]` up to 2³⁰, of how many votes may be bad, and of the
votes `[n]`, of which there are at most 2¹⁶: so no product of weighted sums exceeds 2⁶²."""
_GRAM_BITS = 30
_ONE = 1 << 15
_COSINE = 1 << 12
_LEAST_COSINE = int(0.35 * _COSINE)
_FEW, _FEW_COSINE = 6, int(0.9 * _COSINE)
"""Among fewer members than that no cosine is unusual: only copies are near."""
FLAG_MOST = 128
"""Most groups of which `flag` is found in seconds; its time grows with their cube. More are left to `rfa`."""


def shares_of(weigh: Weigh, gram_PP: Ints, liars_256: int, vote_P: Ints | None = None) -> Ints:
    """Shares int64 `[P]` of each vote, some above 0, of contributions with these inner products."""
    found = np.zeros(len(gram_PP), np.int64)
    gram_PP = gram_PP >> max(0, int(gram_PP.diagonal().max()).bit_length() - _GRAM_BITS)
    # What is empty has no vote: it lies nearer to everybody than they to each other.
    (sent,) = np.nonzero(gram_PP.diagonal())
    if not len(sent):  # nothing to compare: no rule may choose by the order alone
        return found + _ONE
    gram_PP = gram_PP[np.ix_(sent, sent)]
    vote_P = _ones(gram_PP) if vote_P is None else vote_P[sent]
    # Only ratios matter: where all have as many votes, the bits are those of one vote each.
    vote_P = vote_P // np.gcd.reduce(vote_P)
    group_P = groups(gram_PP, vote_P)
    size_G = _sums(vote_P[:, None], group_P)[:, 0]
    gram_GG = _sums(_sums(gram_PP * vote_P * vote_P[:, None], group_P).T, group_P) // (size_G[:, None] * size_G)
    # A group has the most votes that one of it has: near copies take nothing from it, and add nothing.
    vote_G = np.zeros_like(size_G)
    np.maximum.at(vote_G, group_P, vote_P)
    # Fewer than four cannot leave out a part of one either: honest ones would lose it.
    liars = int(vote_G.sum()) * liars_256 >> 8 if len(gram_GG) * liars_256 >> 8 else 0
    # By direction alone: with honest contributions far apart, what is short and points backwards is near to all.
    share_G = weigh(cosines(gram_GG, 1 << _GRAM_BITS), liars, vote_G)
    if not share_G.any():
        share_G = vote_G
    found[sent] = (share_G * _ONE // size_G)[group_P]
    return found


def _sums(row_PN: Ints, group_P: Ints) -> Ints:
    """The sum of each group's rows, int64 `[G, N]`."""
    found = np.zeros((int(group_P.max()) + 1, row_PN.shape[1]), np.int64)
    np.add.at(found, group_P, row_PN)
    return found


def _ones(gram_NN: Ints) -> Ints:
    """One vote each."""
    return np.ones(len(gram_NN), np.int64)


def weighted_median(value_N: npt.NDArray[Any], vote_N: Ints) -> int:
    """The first of the rising values at which twice the votes so far exceed all votes: of two the upper one."""
    order_N = np.argsort(value_N, kind="stable")
    so_far_N = np.cumsum(vote_N[order_N])
    return int(value_N[order_N[np.searchsorted(2 * so_far_N, so_far_N[-1], side="right")]])


def groups(gram_PP: Ints, vote_P: Ints | None = None) -> Ints:
    """int64 `[P]`: number of the group of near copies that each belongs to."""
    cosine_PP = cosines(gram_PP)
    count = len(cosine_PP)
    group_P = np.arange(count)
    near = cosine_PP >= threshold(cosine_PP, vote_P)
    # Joined one by one: what is near to one of a group is in the group.
    for i, j in np.argwhere(np.tril(near, -1)):
        one, other = sorted((group_P[i], group_P[j]))
        if one != other:
            group_P[group_P == other] = one
    found: Ints = np.unique(group_P, return_inverse=True)[1].astype(np.int64)
    return found


def cosines(gram_PP: Ints, one: int = _COSINE) -> Ints:
    """int64 `[P, P]`, units of 1 / `one`, rounded down; 0 where a contribution is empty."""
    length_P = np.sqrt(gram_PP.diagonal().astype(np.float64))
    below_PP = np.maximum(length_P[:, None] * length_P, 1.0)
    found: Ints = np.floor(gram_PP.astype(np.float64) / below_PP * one).astype(np.int64)
    return found


def threshold(cosine_PP: Ints, vote_P: Ints | None = None) -> int:
    """Least cosine of near copies: the median plus six times the median distance from it, 0.35 at least."""
    vote_P = _ones(cosine_PP) if vote_P is None else vote_P
    if vote_P.sum() < _FEW * vote_P.max():
        return _FEW_COSINE
    pairs = np.tril_indices(len(cosine_PP), -1)
    each, votes = cosine_PP[pairs], (vote_P * vote_P[:, None])[pairs]
    median = weighted_median(each, votes)
    spread = weighted_median(np.abs(each - median), votes)
    return min(max(_LEAST_COSINE, median + 6 * spread), _FEW_COSINE)


def distances2(gram_NN: Ints) -> Ints:
    """Squared distances int64 `[n, n]` of n vectors."""
    length2_N = gram_NN.diagonal()
    found: Ints = np.maximum(length2_N[:, None] + length2_N - 2 * gram_NN, 0)
    return found


def nearest(gram_NN: Ints, liars: int, vote_N: Ints | None = None) -> Ints:
    """Votes int64 `[n, n]`: row i has those of i and of its nearest others, all votes − liars together."""
    vote_N = _ones(gram_NN) if vote_N is None else vote_N
    distance2_NN = distances2(gram_NN)
    np.fill_diagonal(distance2_NN, -1)
    order_NN = np.argsort(distance2_NN, axis=1, kind="stable")
    ranked_NN = vote_N[order_NN]
    before_NN = np.cumsum(ranked_NN, axis=1) - ranked_NN
    found = np.zeros_like(gram_NN)
    # Of the last one a part: in whole contributions, one with many votes would be left out by one vote more.
    left_NN = np.clip(int(vote_N.sum()) - liars - before_NN, 0, ranked_NN)
    np.put_along_axis(found, order_NN, left_NN, axis=1)
    return found


def nnm(gram_NN: Ints, liars: int, vote_N: Ints | None = None) -> Ints:
    vote_N = _ones(gram_NN) if vote_N is None else vote_N
    near_NN, votes = nearest(gram_NN, liars, vote_N), int(vote_N.sum()) - liars
    mixed_NN = near_NN @ gram_NN @ near_NN.T // votes**2
    found: Ints = near_NN.T @ rfa(mixed_NN, liars, vote_N) // votes
    return found


def krum(gram_NN: Ints, liars: int) -> Ints:
    count = len(gram_NN)
    rising_NN = np.sort(distances2(gram_NN), axis=1)
    # Its own distance, 0, is the first; a group of two has one neighbour.
    score_N = rising_NN[:, : max(2, count - liars - 1)].sum(axis=1)
    found = np.zeros(count, np.int64)
    found[np.argsort(score_N, kind="stable")[: count - liars]] = 1
    return found


def rfa(gram_NN: Ints, liars: int, vote_N: Ints | None = None, steps: int = 8) -> Ints:
    vote_N = _ones(gram_NN) if vote_N is None else vote_N
    share_N = vote_N * _ONE // int(vote_N.sum())
    for _ in range(steps):
        inverse_N = (1 << 40) // np.maximum(_lengths(gram_NN, share_N), 1)
        share_N = _to_one(vote_N * inverse_N)
    return share_N


def cclip(gram_NN: Ints, liars: int, steps: int = 5) -> Ints:
    count = len(gram_NN)
    share_N = np.full(count, _ONE // count, np.int64)
    for _ in range(steps):
        length_N = _lengths(gram_NN, share_N)
        limit = np.sort(length_N)[count // 2]
        move_N = np.minimum(_ONE, limit * _ONE // np.maximum(length_N, 1))
        share_N = share_N - share_N * int(move_N.sum()) // (count * _ONE) + move_N // count
    return share_N


def flag(gram_NN: Ints, liars: int) -> Ints:
    if len(gram_NN) > FLAG_MOST:
        return rfa(gram_NN, liars)
    return flag_shares(gram_NN, 1 << _GRAM_BITS)


def _lengths(gram_NN: Ints, share_N: Ints) -> Ints:
    """Distance of each vector from the sum of all, each times its share in units of 1 / _ONE; rounded down."""
    total = max(1, int(share_N.sum()))
    toward_N = gram_NN @ share_N
    centre = int(share_N @ toward_N) // total // total
    length2_N = gram_NN.diagonal() - 2 * (toward_N // total) + centre
    found: Ints = np.floor(np.sqrt(np.maximum(length2_N, 0).astype(np.float64))).astype(np.int64)
    return found


def _to_one(share_N: Ints) -> Ints:
    """Shares whose sum is about _ONE."""
    found: Ints = share_N * _ONE // int(share_N.sum())
    return found


def _once(rule: Callable[[Ints, int], Ints]) -> Weigh:
    """A rule that sees each group once, whatever its votes."""
    return lambda gram_NN, liars, vote_N: rule(gram_NN, len(vote_N) * liars // int(vote_N.sum())) * vote_N


RULES: dict[str, Weigh] = {"nnm": nnm, "krum": _once(krum), "rfa": rfa, "cclip": _once(cclip), "flag": _once(flag)}
