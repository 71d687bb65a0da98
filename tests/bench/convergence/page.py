"""The results page of `bench convergence`, written from the stored lines alone: equal lines give an equal page."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from atoll.p2p.system.atomic_files import write_whole
from atoll.protocols.errors import ConfigError
from atoll.protocols.run.arena import CHUNK
from atoll_bench.convergence.arms import KEPT, LENGTHS, MEMBERS, SIZES, SMALLEST, Settings, methods, spec_of
from atoll_bench.convergence.parts import CARRIED, Cell, Wanted, best_trial, cells, trials_of
from atoll_bench.convergence.plots import draw
from atoll_bench.convergence.store import Line
from atoll_bench.convergence.tables import PARALLEL, Runs, bar_rows, claim_rows, estimate, ratio, whole_runs
from atoll_bench.convergence.trial import VALIDATION_TOKENS
from atoll_bench.report import Row

_HEAD = """# Results: outer loops compared

What `atoll bench convergence` measured. The command wrote this page from the
[raw lines](convergence.jsonl), one for each trained arm; do not edit it. How the bench works, and
how to repeat it: [bench-convergence](../bench-convergence.md). The rules, what shorter runs gave,
and methods without an arm: [outer-loop](../outer-loop.md).

Claims are what the papers say of their methods, as a ratio of losses of equal seeds; at most 1.005
where a method shall be as good. Those whose arms were not run are left out. Arms have the loss at
the end, mean over seeds ± half of the 95 % interval, its ratio to data-parallel AdamW's of equal
seeds, and the bytes that one member sent in the whole run.
"""


def write_page(path: Path, wanted: Wanted, lines: Sequence[Line]) -> None:
    """Write the page, and its plots beside it. Raises ConfigError without lines or matplotlib, DiskFault."""
    found = groups(wanted, lines)
    if not found:
        raise ConfigError("nothing to report: no arm is stored", hint="--store names the folder of the lines")
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = [_HEAD]
    for group in found:
        runs = whole_runs(group, lines)
        name = f"{path.stem}-{group.size}-{group.total}"
        plots = [f"{name}-{kind}.svg" for kind in ("tokens", "bytes")]
        for kind, plot in zip(("tokens", "bytes"), plots, strict=True):
            draw(path.parent / plot, kind, _curves(runs))
        parts += [*_section(group, runs, lines), *_images(plots)]
    untouched = [size for size in SIZES if size not in {group.size for group in found}]
    parts += [f"Sizes that were not run: {', '.join(untouched)}.\n"] if untouched else []
    write_whole(path, "\n".join(parts).encode(), mode=0o644)


def groups(wanted: Wanted, lines: Sequence[Line]) -> list[Wanted]:
    """Sizes and lengths of which the lines hold whole runs, most first, with seeds and methods of `wanted`."""
    found = {(line.arm.size, line.arm.total) for line in lines}
    counts = {
        group: sum(map(len, whole_runs(group, lines).values()))
        for group in (wanted._replace(size=size, total=total) for size, total in sorted(found))
    }
    return sorted((group for group, count in counts.items() if count), key=lambda group: -counts[group])


def _curves(runs: Runs) -> dict[str, list[Line]]:
    """What is drawn: methods at the least H and the middle k, or without rounds. More would hide each other."""
    found = {name: [at[seed] for seed in sorted(at)] for name, at in runs.items()}
    return {
        name: lines
        for name, lines in found.items()
        if lines[0].arm.steps in (1, LENGTHS[0]) and lines[0].arm.k in (KEPT[1], CHUNK)
    }


def _section(group: Wanted, runs: Runs, lines: Sequence[Line]) -> list[str]:
    own = [line for at in runs.values() for line in at.values()]
    claimed = claim_rows(group, lines)
    missing = [cell for cell in cells(group) if cell.name not in runs]
    title = f"{group.size}: {own[0].parameters:,} parameters, {group.total:,} steps of each member"
    return [
        f"## {title}\n",
        _setting(own, lines, group),
        "### Bars\n",
        _table(("figure", "bar", "seen", "", ""), [_bar_cells(row) for row in bar_rows(group, lines)]),
        "### Claims\n",
        _table(("claim", "bar", "seen", "", ""), [_bar_cells(row) for row in claimed if row.value is not None]),
        "### Arms\n",
        _table(
            ("arm", "method", "settings that were tried and won", "bits/byte", "of AdamW", "bytes", "seeds"),
            [_arm_cells(runs, name) for name in sorted(runs, key=lambda n: _loss(runs, n))],
        ),
        *_not_run(missing),
        "### Trials\n",
        _tried_how(group),
        _table(("method", "settings: loss"), _trial_rows(group, lines)),
    ]


def _setting(own: Sequence[Line], lines: Sequence[Line], group: Wanted) -> str:
    spec = spec_of(own[0].arm)
    step = f"{MEMBERS} members, {spec.inner.batch} windows of {spec.model.context} tokens in each step of a member"
    tokens = max(line.points[-1].tokens for line in own if line.points)
    seeds = ", ".join(map(str, sorted({line.arm.seed for line in own})))
    codes = ", ".join(f"`{code}`" for code in sorted({line.code for line in own}))
    cpu_s = sum(line.cpu_s for line in own)
    # Codes and builds of torch grow in number with the sessions that trained.
    made_with = _filled(
        f"Code {codes}, {', '.join(sorted({line.device for line in own}))}, "
        f"torch {', '.join(sorted({line.torch for line in own}))}; {cpu_s:,.0f} CPU seconds of machines "
        "that others used too."
    )
    return (
        f"{step};\n{tokens:,} tokens in all, of `{spec.data.source}`. Seeds {seeds}. Peak rate where no\n"
        f"trial names one {SIZES[group.size].lr:g}; validation on {VALIDATION_TOKENS:,} tokens.\n{made_with}\n"
    )


def _bar_cells(row: Row) -> Sequence[str]:
    verdict = {None: "not run" if row.bar else "", True: "reached", False: "**missed**"}[row.passed]
    seen = "" if row.value is None else f"{row.value:,.0f}" if row.value >= 100 else f"{row.value:.4g}"
    return row.metric, row.bar or "", seen, verdict, "" if row.note == "not run" else row.note


def _arm_cells(runs: Runs, name: str) -> Sequence[str]:
    lines = [line for _, line in sorted(runs[name].items())]
    beside = ratio(runs, name, PARALLEL)
    method = methods().get(lines[0].arm.method)
    own = set(method.settings if method else ())
    chosen = [setting for setting in lines[0].arm.settings if setting not in own and "compress.k=" not in setting]
    failed = "; ".join(line.failed for line in lines if line.failed)
    return (
        name,
        method.label if method else lines[0].arm.method,
        ", ".join(chosen),
        failed or str(estimate([line.val_bpb for line in lines])),
        f"{beside[0].mean:.4f}" if beside else "",
        f"{lines[0].points[-1].sent_bytes:,}" if lines[0].points else "",
        ", ".join(str(line.arm.seed) for line in lines),
    )


def _not_run(missing: Sequence[Cell]) -> list[str]:
    """The cells at the least H and the middle k by name, and how many others."""
    named = [cell.name for cell in missing if cell.steps in (1, LENGTHS[0]) and cell.k == KEPT[1]]
    others = len(missing) - len(named)
    words = [*named, *([f"{others} cells of other H and k"] if others else [])]
    return [_filled(f"**Not run:** {', '.join(words)}.") + "\n"] if words else []


def _filled(text: str) -> str:
    """In lines as the documentation has them; a name with a hyphen stays whole."""
    return textwrap.fill(text, 98, break_on_hyphens=False, break_long_words=False)


def _trial_rows(group: Wanted, lines: Sequence[Line]) -> list[Sequence[str]]:
    stored = {line.arm: line for line in lines}
    rows: list[Sequence[str]] = []
    for name in methods():
        tried = [(trial, stored.get(arm)) for trial, arm in trials_of(name, group, stored)]
        best = best_trial(name, group, stored)
        texts = [
            f"{'**' if trial == best else ''}{_short(trial)}: {line.val_bpb:.4f}{'**' if trial == best else ''}"
            for trial, line in tried
            if line is not None
        ]
        if texts:
            # What lies beyond an edge was not tried: the method may be better than this table says.
            at_edge = len(tried) > CARRIED and best in (tried[0][0], tried[-1][0])
            rows.append((name, "; ".join(texts) + ("; the best is at the edge" if at_edge else "")))
    return rows


def _short(trial: Settings) -> str:
    """Settings without their sections, which the label of the method says."""
    return ", ".join(setting.partition(".")[2] for setting in trial)


def _tried_how(group: Wanted) -> str:
    carried = f" The {CARRIED} best settings of `{SMALLEST}` were tried." if group.size != SMALLEST else ""
    return f"Whole runs, seed 1, H = 15: bits per byte.{carried}\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([_line(head), _line(["---"] * len(head)), *map(_line, rows)]) + "\n"


def _line(texts: Sequence[str]) -> str:
    return "| " + " | ".join(texts) + " |"


def _images(plots: Sequence[str]) -> list[str]:
    return [
        f"![Validation loss against {kind}]({plot})\n"
        for kind, plot in zip(("tokens", "bytes"), plots, strict=True)
    ]


def _loss(runs: Runs, name: str) -> float:
    return estimate([line.val_bpb for line in runs[name].values()]).mean
