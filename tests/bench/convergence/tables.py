"""What the stored arms say: means over seeds with their intervals, ratios of equal seeds, and the bars."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from atoll_bench.convergence.arms import methods
from atoll_bench.convergence.parts import Cell, Wanted, best_trial, cells
from atoll_bench.convergence.store import Line
from atoll_bench.report import Bar, Row, row

OURS, DILOCO, PARALLEL = "sgd H=15 k=64", ("nesterov H=15", "nesterov-float32 H=15"), "adamw-parallel"
WITH_MUON = "sgd-muon H=15 k=64"
LEAST_ROUNDS, LEAST_SEEDS = 300, 3
_COMPARED = (
    ("ours / data-parallel AdamW", OURS, PARALLEL, Bar("<=", 1.02)),
    ("ours with Muon / DiLoCo (nesterov H=15)", WITH_MUON, "nesterov H=15", Bar("<=", 1.0)),
    ("ours with Muon / data-parallel AdamW", WITH_MUON, PARALLEL, Bar("<=", 1.02)),
    ("ours with Muon / DiLoCo with Muon", WITH_MUON, "nesterov-muon H=15", Bar("<=", 1.0)),
    ("ours with Muon / data-parallel Muon", WITH_MUON, "muon-parallel", Bar("<=", 1.02)),
    ("τ = 4 / no overlap", "sgd-overlap H=15 k=64", OURS, Bar("<=", 1.005)),
    ("SparseLoCo with Muon / with AdamW", WITH_MUON, OURS, None),
)
"""Name, arm, the arm beside it, and the bar of the ratio of their losses."""
_NESTEROV, _AVERAGE = "nesterov H=15", "average H=15"
_AT_MOST, _AS_GOOD = Bar("<=", 1.0), Bar("<=", 1.005)
_CLAIMS = (
    ("SparseLoCo below DiLoCo: ours / nesterov", OURS, _NESTEROV, _AT_MOST),
    ("its authors' code as good as ours: reference / ours", "reference H=15 k=64", OURS, _AS_GOOD),
    ("DiLoCo below averaging: nesterov / average, int8", _NESTEROV, _AVERAGE, _AT_MOST),
    ("SlowMo below averaging: slowmo / average, int8", "slowmo H=15", _AVERAGE, _AT_MOST),
    ("Streaming DiLoCo as good as DiLoCo: blend / nesterov", "blend H=15", _NESTEROV, _AS_GOOD),
    ("EDiT not above DiLoCo: edit / nesterov", "edit H=15", _NESTEROV, _AT_MOST),
    ("CO2 as good as its synchronous twin: co2 / slowmo", "co2 H=15", "slowmo H=15", _AS_GOOD),
    ("EControl not above error feedback: econtrol / ours", "econtrol H=15 k=64", OURS, _AT_MOST),
    ("DGC as good as dense: dgc / average, int8", "dgc H=15 k=64", _AVERAGE, _AS_GOOD),
    ("MuLoCo below DiLoCo: nesterov-muon / nesterov", "nesterov-muon H=15", _NESTEROV, _AT_MOST),
    ("MT-DAO below one momentum: sgd-slow / ours", "sgd-slow H=15 k=64", OURS, _AT_MOST),
    ("IsoLoCo below DiLoCo: isotropic / nesterov", "isotropic H=15", _NESTEROV, _AT_MOST),
)
"""What a paper claims of its method, as a ratio of losses here. `_AS_GOOD` allows what seeds differ by."""
_T_975 = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""97.5 % quantiles of Student's t, by degrees of freedom; above 9: that of 9, a little wide."""
Runs = Mapping[str, Mapping[int, Line]]
"""Lines of whole runs by the name of the arm, then by seed."""


class Estimate(NamedTuple):
    """A mean over seeds, and half of its 95 % interval; None with one seed."""

    mean: float
    half: float | None

    def __str__(self) -> str:
        return f"{self.mean:.4f}" + ("" if self.half is None else f" ± {self.half:.4f}")


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and interval of independent values, at least one."""
    mean, count = statistics.fmean(values), len(values)
    if count == 1 or not all(map(math.isfinite, values)):
        return Estimate(mean, None)
    return Estimate(mean, _T_975[min(count - 1, 9)] * statistics.stdev(values) / math.sqrt(count))


def whole_runs(wanted: Wanted, lines: Sequence[Line]) -> Runs:
    """The newest line of each run with the settings that won their trials, of this size and length."""
    stored = {line.arm: line for line in lines}
    found: dict[str, dict[int, Line]] = {}
    for cell in cells(wanted._replace(only=())):
        trial = best_trial(cell.method, wanted, stored)
        if trial is None:
            continue
        for seed in range(1, wanted.seeds + 1):
            line = stored.get(cell.arm(wanted, seed, trial))
            if line is not None:
                found.setdefault(cell.name, {})[seed] = line
    return found


def ratio(runs: Runs, first: str, second: str) -> tuple[Estimate, list[float]] | None:
    """Ratio of the losses at the end, of the seeds that both have; None if there is none."""
    seeds = sorted(runs.get(first, {}).keys() & runs.get(second, {}).keys())
    ratios = [runs[first][seed].val_bpb / runs[second][seed].val_bpb for seed in seeds]
    return (estimate(ratios), ratios) if ratios else None


def rows_of(wanted: Wanted, lines: Sequence[Line]) -> list[Row]:
    """The loss of each arm, then the bars."""
    runs = whole_runs(wanted, lines)
    losses = (_loss_row(runs, cell) for cell in cells(wanted))
    return [*losses, *bar_rows(wanted, lines), *claim_rows(wanted, lines)]


def bar_rows(wanted: Wanted, lines: Sequence[Line]) -> list[Row]:
    """The figures that have a bar."""
    runs = whole_runs(wanted, lines)
    rows = _against_diloco(runs)
    return rows + [_ratio_row(runs, *compared) for compared in _COMPARED]


def claim_rows(wanted: Wanted, lines: Sequence[Line]) -> list[Row]:
    """The direction of each paper's claim."""
    runs = whole_runs(wanted, lines)
    return [_ratio_row(runs, *claim) for claim in _CLAIMS]


def better_diloco(runs: Runs) -> str | None:
    """The better arm of DiLoCo's two, over the seeds that all have; None while one of them is missing."""
    seeds = set.intersection(*(set(runs.get(name, {})) for name in DILOCO))
    if not seeds:
        return None
    return min(DILOCO, key=lambda name: statistics.fmean(runs[name][seed].val_bpb for seed in seeds))


def _against_diloco(runs: Runs) -> list[Row]:
    beside = better_diloco(runs)
    loss, less = Bar("<=", 1.0), Bar(">=", 180)
    if beside is None or OURS not in runs:
        names = ("loss, ours / better DiLoCo, H = 15", "bytes, better DiLoCo / ours, H = 15")
        missing = [name for name in (OURS, *DILOCO) if name not in runs] or ["a seed that all have"]
        note = f"not run: {', '.join(missing)}"
        rows = [row(name, None, "x", bar, note=note) for name, bar in zip(names, (loss, less), strict=True)]
        return [*rows, *(_ratio_row(runs, f"loss, ours / {name}", OURS, name, None) for name in DILOCO)]
    ours, other = next(iter(runs[OURS].values())), next(iter(runs[beside].values()))
    rounds = _rounds_of(ours)
    rows = [
        _ratio_row(runs, f"loss, ours / better DiLoCo ({beside})", OURS, beside, loss),
        row("rounds of that comparison", rounds, "rounds", Bar(">=", LEAST_ROUNDS)),
        row("seeds of that comparison", _seeds_of(runs, OURS, beside), "seeds", Bar(">=", LEAST_SEEDS)),
        row(f"bytes, {beside} / ours", other.points[-1].sent_bytes / ours.points[-1].sent_bytes, "x", less),
    ]
    for name in (name for name in DILOCO if name != beside):
        sent = next(iter(runs[name].values())).points[-1].sent_bytes
        rows.append(_ratio_row(runs, f"loss, ours / {name}", OURS, name, None))
        rows.append(row(f"bytes, {name} / ours", sent / ours.points[-1].sent_bytes, "x"))
    return rows


def _rounds_of(line: Line) -> int:
    return -(-line.arm.total // line.arm.steps)


def _seeds_of(runs: Runs, first: str, second: str) -> int:
    return len(runs[first].keys() & runs[second].keys())


def _loss_row(runs: Runs, cell: Cell) -> Row:
    name = cell.name
    metric = f"{name}: {methods()[cell.method].label}"
    if name not in runs:
        return row(metric, None, "bits/byte", note="not run")
    losses = [line.val_bpb for _, line in sorted(runs[name].items())]
    note = "seeds " + ", ".join(f"{loss:.4f}" for loss in losses)
    found = estimate(losses)
    return row(metric, found.mean, "bits/byte", note=note if found.half is None else f"± {found.half:.4f}; {note}")


def _ratio_row(runs: Runs, metric: str, first: str, second: str, bar: Bar | None) -> Row:
    found = ratio(runs, first, second)
    if found is None:
        return row(metric, None, "x", bar, note="not run")
    mean, each = found
    note = "seeds " + ", ".join(f"{value:.4f}" for value in each)
    return row(metric, mean.mean, "x", bar, note=note if mean.half is None else f"± {mean.half:.4f}; {note}")
