"""`atoll bench heal`: what a partition costs the model, by what the side that changes its chain brings along.

Ten members train apart in two parts, meet on the model of the larger one, and train on. A figure is the loss after
that, less the loss of the better side had it gone on alone for as long.
"""

import asyncio
import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from atoll_bench.byzantine.trial import MEMBERS
from atoll_bench.child import Child, enter_all, started
from atoll_bench.heal.sides import ALONE, SHIPPED, WAYS, Length
from atoll_bench.report import Bar, Row, row

BEFORE, AFTER = 10, 10
CUTS = (5, 20, 100)
SMALLER = (5, 3)
"""Members of the smaller side."""
SEEDS = 3
FEEDBACKS = (0.5, 0.95)
"""β: of the presets for runs of a few dozen rounds, and of those for long ones."""
BETTER = Bar("<=", 0.0)
ARM = "atoll_bench.heal.heal_arm"
TRIAL_S = 3600.0


class Heal(NamedTuple):
    """One partition."""

    feedback: float
    cut: int
    smaller: int
    seed: int


Found = dict[Heal, Mapping[str, float]]


async def measure(quick: bool, say: Callable[[str], None], seeds: int = SEEDS) -> list[Row]:
    """Rows of each cut and size, by way. Raises LocalFault."""
    decays, cuts, sizes, drawn = ((0.95,), (1,), (3,), 1) if quick else (FEEDBACKS, CUTS, SMALLER, seeds)
    seen = itertools.product(decays, cuts, sizes, range(1, drawn + 1))
    cases = [Heal(*one) for one in seen]
    found: Found = {}
    async with contextlib.AsyncExitStack() as stack:
        count = min(len(cases), os.cpu_count() or 1)
        arms = await enter_all(stack, [started(ARM) for _ in range(count)])
        waiting = iter(cases)
        async with asyncio.TaskGroup() as group:
            for arm in arms:
                group.create_task(_work(arm, waiting, found, say, 1 if quick else BEFORE))
    return rows_of(found)


async def _work(
    arm: Child, waiting: Iterator[Heal], found: Found, say: Callable[[str], None], before: int
) -> None:
    for case in waiting:
        length = Length(before, case.cut, min(before, AFTER))
        found[case] = await arm.ask(
            "heal", TRIAL_S, seed=case.seed, length=length, smaller=case.smaller, feedback=case.feedback
        )
        say(f"{_title(case)}, seed {case.seed}: " + ", ".join(f"{k} {v:.4f}" for k, v in found[case].items()))


def rows_of(found: Mapping[Heal, Mapping[str, float]]) -> list[Row]:
    """A row for each cut, size and way: its worst seed."""
    kinds = dict.fromkeys(_title(case) for case in found)
    return [
        _row(f"{kind}: {name}", name, [each for case, each in found.items() if _title(case) == kind])
        for kind in kinds
        for name in WAYS
    ]


def _row(title: str, name: str, seeds: Sequence[Mapping[str, float]]) -> Row:
    over = [each[name] - min(each[side] for side in ALONE) for each in seeds]
    note = "seeds " + _listed(over)
    return row(title, max(over), "bits/byte", BETTER if name == SHIPPED else None, note=note)


def _title(case: Heal) -> str:
    shares = (100 * part // MEMBERS for part in (MEMBERS - case.smaller, case.smaller))
    return f"β {case.feedback}, {case.cut} rounds, {'/'.join(map(str, shares))}"


def _listed(values: Iterable[float]) -> str:
    return ", ".join(f"{value:+.4f}" for value in values)
