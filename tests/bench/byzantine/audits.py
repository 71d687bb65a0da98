"""The audited runs of `atoll bench byzantine`: in which round members that do no work lose their weight."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from atoll_bench.byzantine.audit_trial import HONEST, IDLERS
from atoll_bench.child import Child
from atoll_bench.report import Bar, Row, row

WITHIN, NEVER = Bar("<=", 10), Bar("<=", 0)
"""Round in which who does no work has no weight at the latest; honest members that ever have none."""
TRIAL_S = 900.0


async def audited_rows(
    arms: Sequence[Child], seeds: Sequence[int], rounds: int, say: Callable[[str], None], dirichlet: float | None
) -> list[Row]:
    """A row for each kind of idler, and one for the honest. Raises LocalFault."""
    found: list[Mapping[str, Any]] = []
    waiting = iter(seeds)

    async def work(arm: Child, left: Iterator[int]) -> None:
        for seed in left:
            found.append(await arm.ask("audited", TRIAL_S, seed=seed, rounds=rounds, dirichlet=dirichlet))
            say(f"audits, seed {seed}: {found[-1]}")

    async with asyncio.TaskGroup() as group:
        for arm in arms:
            group.create_task(work(arm, waiting))
    return rows_of(found, rounds, dirichlet)


def rows_of(found: Sequence[Mapping[str, Any]], rounds: int, dirichlet: float | None = None) -> list[Row]:
    """The rows of runs of so many rounds."""
    usual = ", ".join(f"{each['usual']:.1f}" for each in found)
    rows, audits = [], "audits" if dirichlet is None else f"audits, Dirichlet {dirichlet:g}"
    for name in IDLERS:
        first = [min(each["idle"][name], default=rounds) for each in found]
        note = f"seeds {', '.join(map(str, first))}; {rounds}: never"
        rows.append(row(f"{audits}: {name} has no weight from round", max(first), "", WITHIN, note=note))
    lost = sum(len(each["honest"]) for each in found)
    note = (
        f"of {len(found) * rounds * HONEST}, one of {HONEST} slow; usual verdicts of the seeds {usual} deviations"
    )
    return [*rows, row(f"{audits}: rounds of honest members without weight", lost, "", NEVER, note=note)]
