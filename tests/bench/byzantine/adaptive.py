"""Attackers that know the rule: they try strengths on the round's own fold, and send what does most harm.

A lie is a base plus γ times a direction (Shejwalkar and Houmansadr, "Manipulating the Byzantine", NDSS 2021). Its
harm is how far the fold with the lies, after codec and rule, ends from the plain fold of the honest alone. A rule
lets go of what is too far away, so harm does not rise with γ for ever: a grid finds the region, and halved steps
the place in it. Nothing is drawn.
"""

from collections.abc import Callable, Sequence
from functools import cache

from torch import Tensor

from atoll_bench.byzantine.attacks import ATTACKS, TRAINED, Attack, Seen, each_alike, min_max_strength

GRID = (0.25, 0.5, 1.0, 1.5, 2.0, 4.0, 8.0, 16.0)
"""Strengths that are tried first; among them those of ALIE (1.5), IPM 0.5 (1.5), IPM 3 (4) and sign flip (2)."""
HALVINGS = 4


def harm_of(lies_LC4096: Tensor, seen: Seen) -> float:
    """Distance of the fold with these lies from the plain fold of the honest alone."""
    return float((seen.fold(lies_LC4096) - seen.honest_step_C4096).norm())


def strongest(harm: Callable[[float], float], grid: Sequence[float], halvings: int = HALVINGS) -> float:
    """The strength with most harm of a grid and of halved steps around its best; ties go to the first tried."""
    known = cache(harm)
    best = max(grid, key=known)
    step = best / 2
    for _ in range(halvings):
        step /= 2
        best = max((best, best - step, best + step), key=known)
    return best


def _most_harmful(bases: Sequence[Tensor], direction: Tensor, grid: Sequence[float], seen: Seen) -> Tensor:
    """The lies `base + γ · direction` of all bases and strengths that do most harm."""

    def lies(base: Tensor, strength: float) -> Tensor:
        return base + strength * direction

    found = [
        lies(base, strongest(lambda strength, base=base: harm_of(lies(base, strength), seen), grid))  # type: ignore[misc]
        for base in bases
    ]
    return max(found, key=lambda each: harm_of(each, seen))


def _bases(seen: Seen) -> tuple[Tensor, Tensor]:
    """All alike, at the mean of the honest; and each at its own work, because near copies have one vote."""
    return each_alike(seen.honest_HC4096.mean(0), seen), seen.own_LC4096


def against_mean(seen: Seen) -> Tensor:
    """From the mean or from their own work, against the mean of the honest."""
    grid = (*GRID, min_max_strength(seen))
    return _most_harmful(_bases(seen), -seen.honest_HC4096.mean(0), grid, seen)


def against_deviation(seen: Seen) -> Tensor:
    """From the mean or from their own work, against the standard deviation of the honest."""
    return _most_harmful(_bases(seen), -seen.honest_HC4096.std(0), GRID, seen)


def against_own(seen: Seen) -> Tensor:
    """From their own work, against it."""
    return _most_harmful([seen.own_LC4096], -seen.own_LC4096, GRID, seen)


ADAPTIVE: dict[str, Attack] = {
    "adaptive mean": against_mean,
    "adaptive deviation": against_deviation,
    "adaptive own": against_own,
}
ALL: dict[str, Attack] = {**ATTACKS, **ADAPTIVE}
WORKING = (*TRAINED, *ADAPTIVE)
"""Attacks whose liars train."""
NAMES: Sequence[str] = tuple(ALL)
