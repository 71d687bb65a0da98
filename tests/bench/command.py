"""`atoll bench`: the published figures, measured again on this machine."""

import asyncio
import importlib
from collections.abc import Awaitable, Sequence
from pathlib import Path

import click

from atoll.cli.formatting import give_report, print_table
from atoll.cli.options import report_options
from atoll.node.runs.presets import NAMES
from atoll.protocols.errors import LocalFault
from atoll_bench.machine import machine
from atoll_bench.report import Row, all_reached, unjudged

BENCHES = {
    "calls": "Calls on loopback, against bare p2pd unary calls and the lattica package.",
    "blobs": "Blobs from one holder and from four, against a raw stream; one holder lies.",
    "connections": "Memory of one node that holds 1,000 idle authenticated connections.",
    "idle": "CPU of daemons that have nothing to do, after a short run of real nodes.",
    "leave": "Every k of n real nodes leave for good, by `stop` and by SIGKILL; presets' pace.",
    "goodput": "Tokens trained while real nodes are killed and come back, over an undisturbed swarm's.",
    "cli": "Start of `--help` and `status`, in turns with `python -c pass`.",
    "compress": "Encoding and folding of payloads, against the published pipeline and memcpy.",
    "step": "Gradients, time and memory of steps in micro-batches and with layers recomputed.",
    "topology": "Bytes per member and round, all-gather against reduce-scatter; a reducer dies, one lies.",
    "reducers": "Rounds until a reducer that lies, or opens nothing, counts no more; small and large arenas.",
    "experts": "Memory, upload, time and loss of members that share a mixture's experts, beside training all.",
    "slices": "Memory, upload, time and loss of members that train slices of a dense model, beside training all.",
    "convergence": "Loss of every outer loop at equal tokens: data-parallel, each rule of the fold, k and H.",
    "byzantine": "Loss of runs with liars under rules of aggregation, by attack and share; cost of the fold.",
    "scale": "Control traffic of a node, and how long a record takes, with 100 and with 2,000 virtual nodes.",
    "heal": "Loss after a partition of two sides that trained apart, over the better side's that goes on alone.",
    "wan": "Nodes that train behind slow links, beside hivemind's averager on the same links (root, Linux).",
}
"""Name -> its one line. A bench is the module `atoll_bench.NAME`, imported when it is asked for."""
OPTIONS = {
    "calls": (),
    "blobs": ("mib",),
    "connections": ("count", "own_limits"),
    "idle": ("nodes",),
    "leave": ("nodes", "store", "minutes"),
    "goodput": ("nodes", "minutes"),
    "cli": (),
    "compress": ("millions", "device"),
    "step": ("device",),
    "topology": ("millions",),
    "reducers": (),
    "experts": ("loss", "device"),
    "slices": ("loss", "preset", "seeds", "store", "device"),
    "convergence": ("store", "part", "minutes", "size", "arms", "rounds", "seeds", "device", "report", "codes"),
    "byzantine": ("rules", "seeds", "attacks", "shares", "dirichlet"),
    "scale": (),
    "heal": ("seeds",),
    "wan": ("nodes", "preset", "rounds", "overlap"),
}
DEADLINE_S = 900.0
DEADLINES_S = {
    "wan": 3600.0,
    "experts": 1800.0,
    "leave": 3 * 3600.0,
    "goodput": 3 * 3600.0,
    "reducers": 3600.0,
    "step": 3600.0,
    "topology": 1800.0,
    "convergence": 24 * 3600.0,
    "byzantine": 4 * 3600.0,
    "heal": 4 * 3600.0,
    "scale": 3600.0,
}
"""Of benches that take longer with a larger preset or with more nodes, or train many runs."""
LOSS_DEADLINE_S = 6 * 3600.0
"""Of a bench that trains whole runs (`--loss`)."""


@click.command(epilog="\b\n" + "\n".join(f"{name:12} {line}" for name, line in BENCHES.items()))
@click.argument("name", type=click.Choice(list(BENCHES)))
@report_options
@click.option("--quick", is_flag=True, help="A few seconds, to see that it works; nothing is judged.")
@click.option("--mib", type=click.IntRange(4, 4096), help="blobs: size of the blob that four holders serve.")
@click.option("--count", type=click.IntRange(1, 4000), help="connections: how many.")
@click.option("--own-limits", is_flag=True, default=None, help="connections: the node may close what it likes.")
@click.option(
    "--millions", type=click.IntRange(1, 1024), help="compress: parameters, in Mi (64; GPU: 1024); topology: (16)."
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="compress, experts, step: `cuda` for the rows of a GPU; slices, convergence: it trains there (cpu).",
)
@click.option("--nodes", type=click.IntRange(2, 16), help="wan, idle, leave, goodput: how many (4).")
@click.option(
    "--minutes",
    type=click.FloatRange(0.1, 60),
    help="goodput: how long each swarm is measured (3); convergence: begin no arm that ends later; leave: begin"
    " no swarm later.",
)
@click.option(
    "--preset", type=click.Choice(NAMES), help="wan: whose run and how many parameters (tiny); slices: (10m)."
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 1000),
    help="wan: how many are measured; convergence: of 15 steps, longer ones as many steps (100).",
)
@click.option(
    "--overlap", type=click.IntRange(1, 1000), help="wan: inner steps before a fold is in (the preset's)."
)
@click.option("--rules", help="byzantine: which, with commas between (mean,nnm).")
@click.option("--attacks", help="byzantine: only those whose names begin so, commas between (all).")
@click.option("--shares", help="byzantine: only these percents of liars, commas between (10,20,30,40).")
@click.option(
    "--dirichlet",
    type=click.FloatRange(0, min_open=True),
    metavar="ALPHA",
    help="byzantine: members read unlike mixtures of works (all read the whole text).",
)
@click.option(
    "--seeds", type=click.IntRange(1, 100), help="byzantine, heal, convergence: how many (3); slices: (2)."
)
@click.option(
    "--store",
    metavar="DIR",
    help="slices, convergence: curves of finished arms; leave: finished swarms. Those are not done again.",
)
@click.option("--part", metavar="I/N", help="convergence: train the I-th of N parts of what is missing (1/1).")
@click.option("--size", help="convergence: micro, tiny, 10m or 125m (micro; on a GPU 125m).")
@click.option(
    "--arms", help="convergence: only these methods, or arms such as `sgd H=15 k=64`, commas between (all)."
)
@click.option(
    "--codes", help="convergence: lines of these older codes count too, commas between (only those of this code)."
)
@click.option("--report", metavar="FILE.md", help="convergence: train nothing; write the page of what is stored.")
@click.option(
    "--loss", is_flag=True, default=None, help="experts, slices: also train whole runs, for an hour and more."
)
def bench(
    name: str, as_json: bool, report_file: Path | None, quick: bool, **options: float | bool | str | None
) -> int:
    """Measure NAME and compare with the bars: calls, blobs, connections, idle, leave, goodput, cli, compress,
    topology, reducers, experts, slices, convergence, byzantine, heal, scale, wan (docs/bench.md).

    Ways that are compared take turns in one run, because machines are shared: trust ratios before seconds. Exit
    status 1 when a bar is missed or could not be measured.
    """
    given = {key: value for key, value in options.items() if value is not None}
    for key in given.keys() - set(OPTIONS[name]):
        raise click.UsageError(f"--{key.replace('_', '-')} is no option of `bench {name}`")
    measure = importlib.import_module(f"atoll_bench.{name}.{name}").measure
    facts = machine()
    deadline_s = LOSS_DEADLINE_S if given.get("loss") else DEADLINES_S.get(name, DEADLINE_S)
    rows = asyncio.run(_within_deadline(deadline_s, measure(quick, _say, **given)))
    if quick:
        rows = unjudged(rows)
    report = {"bench": name, "machine": facts, "quick": quick, "rows": rows}
    head = ("metric", "value", "unit", "bar", "")
    give_report(report, lambda: print_table(head, map(_cells, rows)), as_json=as_json, report_file=report_file)
    return 0 if quick or all_reached(rows) else 1


async def _within_deadline(deadline_s: float, rows: Awaitable[list[Row]]) -> list[Row]:
    try:
        async with asyncio.timeout(deadline_s):
            return await rows
    except TimeoutError as error:
        raise LocalFault(f"no end after {deadline_s:.0f} s") from error


def _say(line: str) -> None:
    """What goes on, beside the table."""
    click.echo(line, err=True)


def _cells(row: Row) -> Sequence[str]:
    judged = {None: "", True: "ok", False: "MISSED"}[row.passed]
    words = "; ".join(word for word in (judged, row.note) if word)
    return row.metric, _figure(row.value), row.unit, row.bar or "", words


def _figure(value: float | None) -> str:
    if value is None:
        return "not measured"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
