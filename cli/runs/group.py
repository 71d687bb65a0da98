"""`run new | list | show | find | exclude | rm`: runs are signed files; making one starts nothing.

The options alone: what the commands do is loaded when they are right.
"""

from pathlib import Path
from typing import Any

import click

from atoll.cli.client import call
from atoll.cli.formatting import print_json
from atoll.cli.options import FRAGMENTS_HELP, UPCYCLE_FORM, home_option, json_option, run_names
from atoll.node.config.home import Home
from atoll.node.runs.presets import NAMES
from atoll.protocols.local.control_messages import MAX_ROUNDS, CommandDone, ExcludePeer
from atoll.protocols.run.admission import MAX_PUZZLE_BITS, MODES

DATA_HELP = "A text: a file, folder or 'PATTERN', a packed text, builtin:shakespeare (default), synthetic:markov."
PUZZLE_HELP = "Newcomers to an open run solve a puzzle: 20 bits take some seconds, each more doubles it; 0: none."
OPEN_HELP = "Who may join; default: open. Where it says open, --guard and --puzzle 20 come with it."
GUARD_HELP = "Every defence against members that lie which the run can have; it is not reduced."
METHOD_HELP = "A published outer loop, with its settings (docs/outer-loop.md); --set has the last word."
SLICES_HELP = "Cut a dense model into so many FFN slices: weak machines train some of them."


@click.group()
def run() -> None:
    """Make, list, show and find runs."""


@run.command()
@click.argument("name")
@home_option
@json_option
@click.option("--preset", "size_name", type=click.Choice(NAMES), help="Model size and recipe; default: tiny.")
@click.option("--data", "source", help=DATA_HELP)
@click.option(
    "--column", metavar="NAME", help="Of rows (JSON lines, Parquet, Arrow), where the text is; text if absent."
)
@click.option(
    "--tokenizer", "chosen", metavar="bytes|bpe8k|FILE", help="FILE: a tokenizer.json; it travels with the run."
)
@click.option("--where", multiple=True, metavar="COLUMN=VALUE", help="Only rows that say so count.")
@click.option(
    "--from-hf",
    "folder",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Start from weights and tokenizer of a Hugging Face folder; the preset gives the recipe only.",
)
@click.option("--upcycle", metavar=UPCYCLE_FORM, help="Make experts of its feed-forward.")
@click.option("--without-fit", is_flag=True, help="Start though the weights say less of the text than a count.")
@click.option(
    "--from-checkpoint",
    "saved",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Go on with what is left of a run that was saved; any number of nodes (see `atoll checkpoint`).",
)
@click.option("--model", metavar="NAME", help="A model of an installed package, with its examples; as lanes.1.")
@click.option("--seed", type=click.IntRange(0), help="Of weights and data order; random if absent.")
@click.option("--admission", "mode", type=click.Choice(MODES), help=OPEN_HELP)
@click.option(
    "--member", "members", multiple=True, metavar="PEERID", help="Admitted by name (see `atoll id show`)."
)
@click.option("--puzzle", type=click.IntRange(0, MAX_PUZZLE_BITS), metavar="BITS", help=PUZZLE_HELP)
@click.option("--guard/--no-guard", default=None, help=GUARD_HELP)
@click.option("--method", metavar="NAME", help=METHOD_HELP)
@click.option("--slices", type=click.IntRange(2), metavar="E", help=SLICES_HELP)
@click.option("--fragments", type=click.IntRange(1), metavar="P", help=FRAGMENTS_HELP)
@click.option("--even-if-too-large", is_flag=True, help="Make it though this machine cannot train it.")
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="For example --set outer.rounds=20.")
def new(name: str, home: Home, as_json: bool, **options: Any) -> None:
    """Write and sign a run; print its id."""
    from atoll.cli.runs.making import RunOptions, make_run

    make_run(name, home, RunOptions(**options), as_json=as_json)


@run.command("rounds")
@home_option
@json_option
@click.option("-n", "--last", default=20, type=click.IntRange(1, MAX_ROUNDS), help="Newest rounds to show.")
@click.pass_context
def list_rounds(ctx: click.Context, /, **options: Any) -> None:
    """What happened in each round of the run that the node trains, or trained last."""
    from atoll.cli.commands.status import rounds

    ctx.invoke(rounds, **options)


@run.command("list")
@home_option
@json_option
def list_runs(home: Home, as_json: bool) -> None:
    """Runs known in this home."""
    from atoll.cli.runs.showing import print_runs

    print_runs(home, as_json=as_json)


@run.command()
@click.argument("wanted", metavar="NAME|ID|FILE", required=False, shell_complete=run_names)
@home_option
@json_option
def show(wanted: str | None, home: Home, as_json: bool) -> None:
    """What a run trains, who signed it, and what it costs here."""
    from atoll.cli.runs.showing import show_run

    show_run(wanted, home, as_json=as_json)


@run.command()
@click.argument("words", nargs=-1)
@home_option
@json_option
@click.option(
    "--dht-bootstrap", multiple=True, metavar="MADDR", help="…/p2p/PEERID of a node that serves the DHT."
)
def find(words: tuple[str, ...], home: Home, as_json: bool, dht_bootstrap: tuple[str, ...]) -> None:
    """Public runs whose name, preset, owner or id have all WORDS.

    Name, size and owner are signed by the owner; members and age are claims of peers.
    """
    from atoll.cli.runs.finding import print_public_runs

    print_public_runs(words, home, dht_bootstrap, as_json=as_json)


@run.command()
@click.argument("peer", metavar="PEER")
@home_option
@json_option
@click.option("--from-round", "first", type=click.IntRange(0), help="Default: the oldest that is not final.")
@click.option("--reason", default="", help="What it and all members read, at most 100 characters.")
@click.option("--excise", is_flag=True, help="Take its work out of final rounds too (pace.excise_rounds).")
@click.option("--since", type=click.IntRange(0), help="With --excise: the first of these; default: all kept.")
def exclude(
    peer: str, home: Home, as_json: bool, first: int | None, reason: str, excise: bool, since: int | None
) -> None:
    """Exclude a member from the run that the node here trains, or vote for it if another node owns the run."""
    if since is not None and not excise:
        raise click.UsageError("--since goes with --excise")
    answer = call(home, ExcludePeer(peer, first, reason, (since or 0) if excise else None), CommandDone)
    if as_json:
        print_json(answer)
    else:
        click.echo(answer.message)


@run.command()
@click.argument("wanted", metavar="NAME|ID", shell_complete=run_names)
@home_option
@json_option
@click.option("--yes", is_flag=True, help="Delete without asking; needed where stdin is no terminal.")
def rm(wanted: str, home: Home, as_json: bool, yes: bool) -> None:
    """Delete a run of this home: its file, weights, ledger and log. What others have of it stays."""
    from atoll.cli.runs.removal import remove_run

    remove_run(wanted, home, as_json=as_json, yes=yes)
