"""Pairwise gossip: a member moves half of the way towards a neighbour, from a common base A.

    D ← ½·D + ½·s·N        D = A − L is what this member trained so far, N what its neighbour did
    s = min(1, ‖D‖/‖N‖)

Where both mix each other's differences of the same moment, and these are equally long, their mean stays. The clip
s bounds what one neighbour can do: D is never longer than it was. Source: arXiv 2507.06542, whose gossip averages
with random neighbours and then all at once; the fold of the round is that last average.
"""

import math

from torch import Tensor


def share_of(own_square: float, their_square: float) -> float:
    """s of the squares of both lengths; 0 for a difference that is not finite, or where nothing was trained."""
    if not math.isfinite(their_square) or not own_square > 0:
        return 0.0
    return math.sqrt(min(1.0, own_square / their_square)) if their_square > 0 else 1.0


def mixed(local_N4096: Tensor, anchor_N4096: Tensor, theirs_N4096: Tensor, share: float) -> Tensor:
    """L of the rows after the mixing, float32, a new array: L + ½·(D − s·N)."""
    return local_N4096 + 0.5 * ((anchor_N4096 - local_N4096) - share * theirs_N4096)
