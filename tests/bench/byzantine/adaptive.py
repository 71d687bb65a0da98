"""Attackers that know the rule: they try strengths on the round's own fold, and send what does most harm.

A lie is a base plus γ times a direction (Shejwalkar and Houmansadr, "Manipulating the Byzantine", NDSS 2021). A
rule lets go of what is too far away, so harm does not rise with γ for ever: a grid finds the region, and halved
steps the place in it. Nothing is drawn.

Harm is measured in two ways, after codec and rule. `distance` (theirs) is how far the fold with the lies ends from
the plain fold of the honest alone. `lost_progress` is what the fold lacks of that one in its own direction: a rule
that moves the model elsewhere, but as far ahead, loses nothing.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

from torch import Tensor

from atoll_bench.byzantine.attacks import ATTACKS, TRAINED, Attack, Seen, each_alike, min_max_strength

GRID = (0.25, 0.5, 1.0, 1.5, 2.0, 4.0, 8.0, 16.0)
"""Strengths that are tried first; among them those of ALIE (1.5), IPM 0.5 (1.5), IPM 3 (4) and sign flip (2)."""
HALVINGS = 4
Harm = Callable[[Tensor, Seen], float]
"""Of lies `[L, C, 4096]` in a round."""


class Way(NamedTuple):
    """Lies `base + γ · direction`, by γ."""

    base_LC4096: Tensor
    direction: Tensor
    grid: Sequence[float] = GRID

    def lies(self, strength: float) -> Tensor:
        """`[L, C, 4096]`."""
        return self.base_LC4096 + strength * self.direction


def distance(lies_LC4096: Tensor, seen: Seen) -> float:
    """Of the fold with these lies from the plain fold of the honest alone."""
    return float((seen.fold(lies_LC4096) - seen.honest_step_C4096).norm())


def lost_progress(lies_LC4096: Tensor, seen: Seen) -> float:
    """Share of the honest step that the fold with these lies lacks in its direction; 1: none is left, 2: it goes
    back as far."""
    ahead = (seen.fold(lies_LC4096) * seen.honest_step_C4096).sum() / seen.honest_step_C4096.square().sum()
    return 1.0 - float(ahead)


def strongest(harm: Callable[[float], float], grid: Sequence[float], halvings: int = HALVINGS) -> float:
    """The strength with most harm of a grid and of halved steps around its best; ties go to the first tried."""
    known = cache(harm)
    best = max(grid, key=known)
    step = best / 2
    for _ in range(halvings):
        step /= 2
        best = max((best, best - step, best + step), key=known)
    return best


def against_mean(seen: Seen) -> list[Way]:
    """From the mean or from their own work, against the mean of the honest."""
    grid = (*GRID, min_max_strength(seen))
    return [Way(base, -seen.honest_HC4096.mean(0), grid) for base in _bases(seen)]


def against_deviation(seen: Seen) -> list[Way]:
    """From the mean or from their own work, against the standard deviation of the honest."""
    return [Way(base, -seen.honest_HC4096.std(0)) for base in _bases(seen)]


def against_own(seen: Seen) -> list[Way]:
    """From their own work, against it."""
    return [Way(seen.own_LC4096, -seen.own_LC4096)]


def against_all(seen: Seen) -> list[Way]:
    """All ways."""
    return [*against_own(seen), *against_mean(seen), *against_deviation(seen)]


def searching(ways: Callable[[Seen], list[Way]], harm: Harm) -> Attack:
    """The attack that sends the most harmful lies of these ways."""

    def attack(seen: Seen) -> Tensor:
        found = [way.lies(strongest(partial(_tried, way, harm, seen), way.grid)) for way in ways(seen)]
        return max(found, key=lambda lies: harm(lies, seen))

    return attack


def _tried(way: Way, harm: Harm, seen: Seen, strength: float) -> float:
    return harm(way.lies(strength), seen)


def _bases(seen: Seen) -> tuple[Tensor, Tensor]:
    """All alike, at the mean of the honest; and each at its own work, because near copies have one vote."""
    return each_alike(seen.honest_HC4096.mean(0), seen), seen.own_LC4096


ADAPTIVE: dict[str, Attack] = {
    "adaptive mean": searching(against_mean, distance),
    "adaptive deviation": searching(against_deviation, distance),
    "adaptive own": searching(against_own, distance),
    "adaptive progress": searching(against_all, lost_progress),
}
ALL: dict[str, Attack] = {**ATTACKS, **ADAPTIVE}
WORKING = (*TRAINED, *ADAPTIVE)
"""Attacks whose liars train."""
NAMES: Sequence[str] = tuple(ALL)
