"""The long part of `bench experts`: the loss of a mixture whose experts are shared out, beside one trained whole.

Every arm is a trial (tests/bench/experts/experts_trial.py) in a process of its own with one thread, as many
at a time as there
are cores: the same Θ₀, the same text in the same order, the same steps; equal tokens but where a member is dead.
"""

import asyncio
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from atoll_bench.child import started
from atoll_bench.reference_arms.baselines import Point
from atoll_bench.report import Bar, Row, row

LOSS = Bar("<=", 1.02)
CHILD = "atoll_bench.experts.experts_arm"
SEED = 1
ROUND_S = 900.0
ARMS = {
    "whole": "all experts by all members",
    "shared": "one holder each",
    "merged": "one holder each, merging warm-up",
    "killed": "one holder each, a member dead for five rounds",
    "lost": "one holder each, a member dead for good",
}
JUDGED = ("shared", "merged")
NOT_ASKED = "not measured: --loss takes an hour"
Curve = Sequence[Point]


async def loss_rows(preset: str, rounds: int, steps: int, say: Callable[[str], None]) -> list[Row]:
    """Validation loss after the last round of each arm, and its curve."""
    free = asyncio.Semaphore(os.cpu_count() or 1)

    async def arm(name: str) -> Curve:
        async with free:
            return await curve_of(name, preset, rounds, steps, say)

    async with asyncio.TaskGroup() as group:
        tasks = {name: group.create_task(arm(name)) for name in ARMS}
    return rows_of({name: task.result() for name, task in tasks.items()})


async def curve_of(name: str, preset: str, rounds: int, steps: int, say: Callable[[str], None]) -> Curve:
    """A point for each round of one arm."""
    points: list[Point] = []
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        async with started(CHILD) as child:
            order: dict[str, Any] = {"arm": name, "preset": preset, "rounds": rounds, "steps": steps, "seed": SEED}
            await child.ask("trial", ROUND_S, folder=folder, **order)
            for _ in range(rounds):
                points.append(msgspec.convert(await child.ask("trial_round", ROUND_S), Point))
                say(f"{name}: round {len(points)} of {rounds}, {points[-1].val_bpb:.4f} bits/byte")
    return points


def rows_of(curves: Mapping[str, Curve]) -> list[Row]:
    """A row for each arm with its curve, then the comparisons."""
    whole = curves["whole"][-1]
    rows = [
        row(f"loss, {ARMS[name]}", curve[-1].val_bpb, "bits/byte", note=_curve(curve))
        for name, curve in curves.items()
    ]
    for name, curve in curves.items():
        if name != "whole":
            note = f"tokens / whole {curve[-1].tokens / whole.tokens:.3f}, one seed"
            rows.append(compared(name, curve[-1].val_bpb / whole.val_bpb, note))
    return rows


def unmeasured_rows() -> list[Row]:
    """The comparisons, of a bench that trained no arm."""
    return [compared(name, None, NOT_ASKED) for name in ARMS if name != "whole"]


def compared(name: str, ratio: float | None, note: str) -> Row:
    """An arm's loss over that of the mixture that is trained whole."""
    return row(f"loss, {ARMS[name]} / whole", ratio, "x", LOSS if name in JUDGED else None, note=note)


def _curve(curve: Curve) -> str:
    """Six points of it, at most."""
    every = max(1, len(curve) // 6)
    shown = [point for point in curve if (point.round + 1) % every == 0]
    return ", ".join(f"round {point.round + 1}: {point.val_bpb:.3f}" for point in shown[-6:])
