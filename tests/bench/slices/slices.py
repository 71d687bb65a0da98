"""`bench slices`: the loss of runs whose members train slices of a dense feed-forward, at equal tokens.

The question is whether members that move disjoint parts of one feed-forward at the same time repair the same error
twice: each moves its slice as if the others stood still. So it is asked for rounds of few steps and of more.
A curve that a folder of `--store` holds is not trained again, so a bench of hours can be ended and started again.
"""

import asyncio
import itertools
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from atoll.node.runs.capacity.memory_model import FROZEN_BYTES, parts_of
from atoll.node.worker.multi_device.group import check_device
from atoll.p2p.system.atomic_files import write_whole
from atoll_bench.child import started
from atoll_bench.reference_arms.baselines import Point
from atoll_bench.report import Bar, Row, paired_ratio, row
from atoll_bench.slices.slices_plans import ARMS, SLICES, Arm, spec_of

CHILD = "atoll_bench.slices.slices_arm"
ROUND_S = 1800.0
STEPS = (8, 15)
TOTALS = {"tiny": 384, "10m": 240}
"""Inner steps of a member."""
SEEDS = 2
RATES = {"one": 2.0}
"""Rates of the slices, √(N / r) as of experts with few holders. Where all train all, 1 (docs/log)."""
ONE, TWO, MIXED, PAIR = Bar("<=", 1.03), Bar("<=", 1.015), Bar("<=", 1.01), Bar("<=", 1.0)
"""Of the loss of members that train all; PAIR: of two members that train all, alone, on each seed."""
MEMORY, UPLOAD = Bar("<=", 1.1), Bar("<=", 1.05)
SEQUENCES, TURNS = 8, 15
Curve = Sequence[Point]
Say = Callable[[str], None]


async def measure(
    quick: bool,
    say: Say,
    *,
    preset: str = "10m",
    seeds: int = SEEDS,
    loss: bool = False,
    store: str = "",
    device: str = "cpu",
) -> list[Row]:
    """Rows of costs; with `loss` of each length of a round, the mixed swarm at the first length only.

    `store`: a folder for the curves of arms that are trained. `device` takes their steps; the costs are those of
    a CPU. Raises ConfigError for a device that is not here, LocalFault.
    """
    check_device(device)
    name, lengths, total = ("tiny", (1,), 2) if quick else (preset, STEPS, TOTALS.get(preset, TOTALS["10m"]))
    drawn = range(1, 1 + (1 if quick else seeds))
    arms = [
        Arm(kind, name, steps, total, seed, 1 if quick else 0, RATES.get(kind, 1.0))
        for steps, kind, seed in itertools.product(lengths, ARMS, drawn)
        if steps == lengths[0] or kind not in ("mixed", "pair")
    ]
    folder = Path(store) if store else None
    free = asyncio.Semaphore(os.cpu_count() or 1)

    async def trained(arm: Arm) -> Curve:
        async with free:
            return await curve_of(arm, folder, say, device)

    rows = await cost_rows(name, *((1, 1) if quick else (SEQUENCES, TURNS)))
    if not (loss or quick):
        return [*rows, *unmeasured_rows()]
    async with asyncio.TaskGroup() as group:
        tasks = {arm: group.create_task(trained(arm)) for arm in arms}
    return [*rows, *rows_of({arm: task.result() for arm, task in tasks.items()})]


async def cost_rows(preset: str, sequences: int, turns: int) -> list[Row]:
    """What a member with one of four slices costs, beside the arithmetic. Raises LocalFault."""
    rows = []
    for frozen in FROZEN_BYTES:
        async with started(CHILD) as child:
            found = await child.ask("held", ROUND_S, preset=preset, frozen=frozen)
        ratio = found["held"] / found["arithmetic"]
        rows.append(row(f"live bytes / (16·T + b·F), one of 4 slices, frozen {frozen}", ratio, "x", MEMORY))
    async with started(CHILD) as child:
        with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
            sent = await child.ask("payloads", ROUND_S, preset=preset, folder=folder)
        seconds = await child.ask("paces", ROUND_S, preset=preset, sequences=sequences, turns=turns)
    model = spec_of(Arm("one", preset, 1, 1, 1, 1)).model
    said = parts_of(model, 1)[0] / model.parameters
    note = f"{sent['one']:,} of {sent['all']:,} B; arithmetic {said:.3f}"
    rows.append(
        row("upload, one of 4 slices / all, over T / P", sent["one"] / sent["all"] / said, "x", UPLOAD, note=note)
    )
    bar = Bar("<=", round((4 + 2 / SLICES) / 6 + 0.1, 4))
    pace = paired_ratio(seconds["one"], seconds["all"])
    return [*rows, row("time of a feed-forward's passes, one of 4 slices / all", pace, "x", bar)]


def unmeasured_rows() -> list[Row]:
    """The comparisons of a bench that trained no arm."""
    judged = (("one", "whole", ONE), ("two", "whole", TWO), ("mixed", "whole", MIXED), ("mixed", "pair", PAIR))
    return [
        row(f"{ARMS[kind]} / {ARMS[beside]}", None, "x", bar, note="not measured: --loss takes hours")
        for kind, beside, bar in judged
    ]


async def curve_of(arm: Arm, store: Path | None, say: Say, device: str = "cpu") -> Curve:
    """A point for each round of one arm, from `store` if it was trained before, on the same kind of device."""
    name = arm.name if device == "cpu" else f"{arm.name}-{device}"
    stored = None if store is None else store / f"{name}.json"
    if stored is not None and stored.is_file():
        return msgspec.json.decode(stored.read_bytes(), type=list[Point])
    points: list[Point] = []
    rounds = spec_of(arm).outer.rounds
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        async with started(CHILD) as child:
            await child.ask("trial", ROUND_S, folder=folder, arm=arm, device=device)
            for _ in range(rounds):
                points.append(msgspec.convert(await child.ask("trial_round", ROUND_S), Point))
                say(f"{arm.name}: round {len(points)} of {rounds}, {points[-1].val_bpb:.4f} bits/byte")
    if stored is not None:
        stored.parent.mkdir(parents=True, exist_ok=True)
        write_whole(stored, msgspec.json.encode(points))
    return points


def rows_of(curves: Mapping[Arm, Curve]) -> list[Row]:
    """For each length of a round: the losses, and the mean over seeds of each arm's over that of the whole one."""
    rows: list[Row] = []
    for steps in dict.fromkeys(arm.steps for arm in curves):
        last = {(arm.kind, arm.seed): curve[-1].val_bpb for arm, curve in curves.items() if arm.steps == steps}
        rows += [
            row(f"H = {steps}: {ARMS[kind]}", _mean(_of(last, kind)), "bits/byte", note=_listed(last, kind))
            for kind in dict.fromkeys(kind for kind, _ in last)
        ]
        for kind, bar in (("one", ONE), ("two", TWO), ("mixed", MIXED)):
            if _of(last, kind):
                rows.append(_compared(last, steps, kind, "whole", bar))
        if _of(last, "pair"):
            rows.append(_compared(last, steps, "mixed", "pair", PAIR))
    return rows


Losses = Mapping[tuple[str, int], float]


def _compared(last: Losses, steps: int, kind: str, beside: str, bar: Bar) -> Row:
    ratios = [loss / last[beside, seed] for (one, seed), loss in last.items() if one == kind]
    # Better than two members alone is asked of each seed, the other bars of the mean.
    value = max(ratios) if beside == "pair" else _mean(ratios)
    note = "seeds " + ", ".join(f"{ratio:.4f}" for ratio in ratios)
    return row(f"H = {steps}: {ARMS[kind]} / {ARMS[beside]}", value, "x", bar, note=note)


def _of(last: Losses, kind: str) -> list[float]:
    return [loss for (one, _), loss in last.items() if one == kind]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _listed(last: Losses, kind: str) -> str:
    return "seeds " + ", ".join(f"{loss:.4f}" for loss in _of(last, kind))
