"""`atoll sim`: a swarm of real processes on loopback, with kills and late joins, judged at the end."""

import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from atoll.cli.command_table import extension
from atoll.cli.formatting import give_report
from atoll.cli.options import FRAGMENTS_HELP, UPCYCLE_FORM, report_options
from atoll.node.runs.presets import NAMES
from atoll.protocols.errors import ConfigError

REAL_NODES_MOST = 16
_PATH = click.Path(path_type=Path)


@click.command("sim")
@click.option(
    "-n", "--nodes", default=4, show_default=True, type=click.IntRange(1), help="Nodes at the start; 16 real ones."
)
@click.option("--rounds", type=click.IntRange(2, 10_000), help="Outer rounds; default: the preset's.")
@click.option("--steps", type=click.IntRange(1, 1000), help="Inner steps of every round; default: the preset's.")
@click.option("--seed", default=1, show_default=True, help="Decides data order, victims and times.")
@click.option("--preset", "preset_name", default="tiny", show_default=True, type=click.Choice(NAMES))
@click.option("--holders", default=0, show_default=True, help="Nodes that train each expert; 0: all nodes.")
@click.option("--fragments", default=1, type=click.IntRange(1), metavar="P", help=FRAGMENTS_HELP)
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="As of `run new`; the last word.")
@click.option("--data", default="builtin:shakespeare", show_default=True, help="Data source of the run.")
@click.option("--from-hf", type=_PATH, metavar="DIR", help="Weights and tokenizer of a Hugging Face folder.")
@click.option("--upcycle", metavar=UPCYCLE_FORM, help="Make experts of its feed-forward.")
@click.option("--kill", is_flag=True, help="SIGKILL one node in the first half; it comes back.")
@click.option("--late-join", is_flag=True, help="One more node joins half way.")
@click.option("--reduce-above", type=click.IntRange(1, 16), help="Contributors above which rounds are reduced.")
@click.option("--baselines", is_flag=True, help="Also train the reference arms at equal tokens.")
@click.option("--virtual", is_flag=True, help="On virtual time, without processes: faults and liars.")
@click.option("--minutes", default=20.0, show_default=True, type=click.FloatRange(1), help="Virtual minutes.")
@click.option("--seeds", default=1, show_default=True, type=click.IntRange(1), help="Virtual runs from --seed.")
@click.option("--liars", type=click.IntRange(0), help="Virtual members that lie; default: drawn from the seed.")
@click.option("--trainers", type=click.IntRange(1), help="Virtual, over real gossip, no faults: so many train.")
@click.option("--dir", "folder", type=_PATH, help="Keep homes and logs here.")
@report_options
@click.option(
    "--timeout", "patience_s", default=300.0, show_default=True, help="Give up after so many seconds in vain."
)
def sim(folder: Path | None, as_json: bool, report_file: Path | None, patience_s: float, **options: Any) -> None:
    """Start a swarm of real nodes on loopback, watch it train, and check its promises.

    With --virtual: the machines of rounds and of finality on virtual time, through random faults and liars
    (docs/simulation.md). Exit status 1 when a promise is broken.
    """
    play = {name: options.pop(name) for name in ("minutes", "seeds", "liars", "trainers")}
    if options.pop("virtual"):
        module, _, name = extension("atoll.simulator", "seeds", "the simulator").partition(":")
        simulate_seeds = getattr(importlib.import_module(module), name)
        place = {"as_json": as_json, "report_file": report_file}
        sys.exit(not simulate_seeds(seed=options["seed"], nodes=options["nodes"], **place, **play))
    if options["nodes"] > REAL_NODES_MOST:
        raise ConfigError(f"at most {REAL_NODES_MOST} real nodes", hint="`--virtual` takes more")
    from atoll.cli.sim.report import print_report
    from atoll.cli.sim.simulation import simulate

    with tempfile.TemporaryDirectory(prefix="atoll-sim-") as temporary:
        report = simulate(folder or Path(temporary), patience_s, **options)
        give_report(report, lambda: print_report(report, click.echo), as_json=as_json, report_file=report_file)
        if not all(check["ok"] for check in report["checks"]):
            sys.exit(1)
