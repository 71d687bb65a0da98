"""How many steps a node may run ahead of the fold that it waits for: τ, from what its own link was seen to need.

A round's lag is the number of its steps for which the fold of the round before was not there yet, those included
that were not taken because the worker was held. So it is the time from the end of the encoding to the fold, in the
node's own steps: upload, other members' payloads and the fold. τ follows the upper quartile of the last lags,
within the bounds of the RunSpec. A fold that comes sooner is merged at once, whatever τ is. Pure.
"""

from dataclasses import dataclass, replace
from math import ceil

REMEMBERED = 8
"""Rounds that count: two of them that were disturbed change nothing."""
ENOUGH = 4
"""Rounds that must be measured before they count: until then a node runs ahead as far as the run lets it."""
SPARE = 1.0
"""Steps more than are needed that τ may be: it falls only where this much is saved."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """Bounds of the run, what was measured, and what follows from it."""

    least: int
    most: int
    chosen: int
    """Steps that may be taken before the fold is in."""
    lags: tuple[float, ...] = ()
    """Steps that the fold was late in the newest rounds, oldest first."""


def begin(least: int, most: int) -> Ahead:
    """Nothing is measured: a wait would be lost time, steps ahead are within what the run allows."""
    return Ahead(least, most, most)


def lag_of(overlapped: int, held_s: float, train_s: float, steps: int) -> float:
    """Steps that a round would have needed not to wait: `overlapped` ones were taken, then it was held.

    `train_s`: what its `steps` steps took, without `held_s`.
    """
    return overlapped + (held_s * steps / train_s if train_s > 0 else 0.0)


def measured(ahead: Ahead, lag: float) -> Ahead:
    """After a round that had another one in flight."""
    lags = (*ahead.lags, lag)[-REMEMBERED:]
    if len(lags) < ENOUGH:
        return replace(ahead, lags=lags)
    needed = sorted(lags)[-(-3 * len(lags) // 4) - 1]
    wish = min(max(ahead.chosen, ceil(needed)), ceil(needed + SPARE))
    return replace(ahead, lags=lags, chosen=max(ahead.least, min(ahead.most, wish)))
