"""Which arms a bench trains, in which order, and which of them are still missing. Pure.

Settings are tried on the first seed, so a method's other runs are known only when its trials are stored.
"""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from atoll.protocols.errors import ConfigError
from atoll_bench.convergence.arms import KEPT, LENGTHS, SMALLEST, Arm, Settings, arm_of, methods
from atoll_bench.convergence.store import Line

Stored = Mapping[Arm, Line]
_MAIN = ("adamw-parallel", "sgd", "nesterov", "nesterov-float32")
"""Methods that the bars compare: all their seeds come first."""
CARRIED = 2
"""Settings of a method that a larger size tries: the best ones of the smallest size."""


class Wanted(NamedTuple):
    """What a bench shall train."""

    size: str
    total: int
    """Inner steps of a member."""
    seeds: int
    only: tuple[str, ...] = ()
    """Methods, or arms by name; empty: all."""


class Cell(NamedTuple):
    """A whole run of a method but for its seed."""

    method: str
    steps: int
    k: int

    @property
    def name(self) -> str:
        """As `Arm.name`."""
        return arm_of(self.method, "micro", total=1, seed=1, steps=self.steps, k=self.k).name

    def arm(self, wanted: Wanted, seed: int, trial: Settings) -> Arm:
        """The run of this seed with the settings of a trial."""
        return arm_of(
            self.method, wanted.size, total=wanted.total, seed=seed, steps=self.steps, k=self.k, trial=trial
        )


def cells(wanted: Wanted) -> list[Cell]:
    """All whole runs, in the order of their weight for the bars. Raises ConfigError for a name that is none."""
    known = methods()
    first = [Cell(name, 1 if known[name].parallel else 15, 64) for name in sorted(known, key=_weight)]
    more = [
        Cell(name, steps, k)
        for steps in LENGTHS
        for k in KEPT
        for name in known
        if not known[name].parallel and (k == 64 or known[name].sparse)
    ]
    more.sort(key=lambda cell: (cell.k != 64, cell.method != "sgd"))
    every = list(dict.fromkeys([*first, *more]))
    for name in wanted.only:
        if not any(name in (cell.method, cell.name) for cell in every):
            raise ConfigError(f"no method {name!r}", hint=f"use some of {', '.join(known)}")
    return [cell for cell in every if not wanted.only or {cell.method, cell.name} & set(wanted.only)]


def _weight(name: str) -> int:
    return _MAIN.index(name) if name in _MAIN else len(_MAIN)


def trials_of(method: str, wanted: Wanted, stored: Stored) -> list[tuple[Settings, Arm]]:
    """The runs in which a method's settings are tried; none where there is one setting.

    They are whole runs of the first seed at the least H: a third of a run chose rates and β that were wrong for
    the whole (docs/bench-convergence.md). A larger size tries those that were best at the smallest one, the same
    number for each method, because all of them would take hours.
    """
    trials = methods()[method].trials
    if len(trials) == 1:
        return []
    if wanted.size != SMALLEST:
        trials = _carried(method, stored) or trials
    return [(trial, arm_of(method, wanted.size, total=wanted.total, seed=1, trial=trial)) for trial in trials]


def _carried(method: str, stored: Stored) -> tuple[Settings, ...]:
    """The best settings of the smallest size, best first, of its longest runs that tried all; else none."""
    trials = methods()[method].trials
    for total in sorted({arm.total for arm in stored if arm.size == SMALLEST}, reverse=True):
        tried = {trial: arm_of(method, SMALLEST, total=total, seed=1, trial=trial) for trial in trials}
        if stored.keys() >= set(tried.values()):
            return tuple(sorted(trials, key=lambda trial: stored[tried[trial]].val_bpb)[:CARRIED])
    return ()


def best_trial(method: str, wanted: Wanted, stored: Stored) -> Settings | None:
    """The settings with the lowest loss; None while a trial is missing."""
    tuned = methods()[method].tuned_as or method
    tried = trials_of(tuned, wanted, stored)
    if not tried:
        return methods()[tuned].trials[0]
    losses = [(stored[arm].val_bpb if arm in stored else math.nan, trial) for trial, arm in tried]
    return None if any(math.isnan(loss) for loss, _ in losses) else min(losses)[1]


def arms(wanted: Wanted, stored: Stored) -> Iterator[Arm]:
    """Every arm that can be named now, stored or not, in the order in which they should be trained."""
    found = cells(wanted)
    main = [cell for cell in found if cell.method in _MAIN and cell.steps in (1, 15) and cell.k == 64]
    rest = [cell for cell in found if cell not in main]
    for group, seeds in (
        (main, range(1, wanted.seeds + 1)),
        (rest, range(1, 2)),
        (rest, range(2, wanted.seeds + 1)),
    ):
        tuned = dict.fromkeys(methods()[cell.method].tuned_as or cell.method for cell in group)
        for method in tuned:
            yield from (arm for _, arm in trials_of(method, wanted, stored))
        for seed in seeds:
            for cell in group:
                trial = best_trial(cell.method, wanted, stored)
                if trial is not None:
                    yield cell.arm(wanted, seed, trial)


def next_arm(wanted: Wanted, stored: Stored, part: int = 1, parts: int = 1) -> Arm | None:
    """The next arm of this part that is not stored; None if all that can be named now are."""
    missing = (arm for arm in arms(wanted, stored) if arm not in stored and int(arm.key, 16) % parts == part - 1)
    return next(missing, None)
