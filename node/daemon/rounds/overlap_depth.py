"""How many steps a node may train ahead of the fold that it waits for: τ, from what its own link needed so far.

A round's lag is the number of its steps for which the fold of the round before was missing, those included that
the worker could not take because it was held. So the lag is the time from the end of the encoding to the fold, in
the node's own steps: upload, other members' payloads and the fold. τ follows the upper quartile of the last lags,
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
    """The run's bounds of τ, the measured lags, and the τ that follows from them; all in inner steps."""

    least: int
    """Lower bound of τ by the RunSpec; `most` is the upper one."""
    most: int
    chosen: int
    """τ: steps that may be taken before the fold is in."""
    lags: tuple[float, ...] = ()
    """Lags of the newest rounds, oldest first."""


def begin(least: int, most: int) -> Ahead:
    """The state before anything is measured."""
    # A wait would be lost time, and steps ahead are within what the run allows: begin with the most.
    return Ahead(least, most, most)


def lag_of(overlapped: int, held_s: float, train_s: float, steps: int) -> float:
    """The lag of a round in steps: `overlapped` were taken, then the worker was held for `held_s` seconds.

    `train_s` is the time of its `steps` steps, without `held_s`.
    """
    return overlapped + (held_s * steps / train_s if train_s > 0 else 0.0)


def measured(ahead: Ahead, lag: float) -> Ahead:
    """The state after a round of lag `lag` that had another one in flight."""
    lags = (*ahead.lags, lag)[-REMEMBERED:]
    if len(lags) < ENOUGH:
        return replace(ahead, lags=lags)
    # The quartile, not the largest: two disturbed rounds of eight must not make every later round stale.
    needed = sorted(lags)[-(-3 * len(lags) // 4) - 1]
    # Rises to what is needed, falls only where more than a whole step is saved: jitter does not move τ.
    wish = min(max(ahead.chosen, ceil(needed)), ceil(needed + SPARE))
    return replace(ahead, lags=lags, chosen=max(ahead.least, min(ahead.most, wish)))
