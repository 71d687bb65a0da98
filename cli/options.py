"""Options that many commands share, and those of `start` about the network."""

from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from atoll.cli.command_group import chosen_home, for_people, renamed

UPCYCLE_FORM = "experts=E,per_token=K[,noise_shift=N]"
FRAGMENTS_HELP = "Exchange the model in P parts, in P times as many rounds: a lower peak rate, as many bytes."
F = TypeVar("F", bound=Callable[..., Any])


OLD_SEED, with_old_seeds = renamed("--seed", "--peer", "seeds")
_NETWORK = (
    OLD_SEED,
    click.option(
        "--peer",
        "seeds",
        multiple=True,
        metavar="MADDR",
        callback=with_old_seeds,
        help="…/p2p/PEERID of a node to dial first.",
    ),
    click.option("--port", type=int, help="Listen here by TCP and QUIC; 0: pick one, and keep it."),
    click.option("--listen", multiple=True, metavar="MADDR", help="Instead of --port: /ip4/0.0.0.0/tcp/4710."),
    click.option("--announce", multiple=True, metavar="MADDR", help="Tell others this, after a port forward."),
    click.option("--port-map/--no-port-map", default=None, help="Ask the router for a port (UPnP, NAT-PMP)."),
    click.option("--transport", type=click.Choice(("p2pd", "pylibp2p")), help="The libp2p to use."),
    click.option("--relay/--no-relay", default=None, help="Relay for nodes that nobody reaches otherwise."),
    click.option("--up", metavar="RATE", help="Cap of what is sent, all protocols together: 20mbit, 2.5MB/s."),
    click.option("--down", metavar="RATE", help="Cap of what is received."),
    click.option("--relay-only/--no-relay-only", default=None, help="Through relays only; hide the address."),
    click.option("--web", metavar="IP:PORT", help="Serve a page and metrics here, to read: localhost:4780."),
    click.option("--dht/--no-dht", default=None, help="Take part in the DHT; else where it is of use."),
    click.option("--dht-bootstrap", multiple=True, metavar="MADDR", help="…/p2p/PEERID of a node that serves it."),
    click.option("--public/--private", default=None, help="List the run in the DHT; else if everybody may join."),
)

_GUEST = (
    click.option("--hours", metavar="22:00-07:00", help="Train in these hours only, local time."),
    click.option("--battery", type=click.Choice(("train", "pause")), help="What to do on battery."),
    click.option("--idle-after", metavar="10m", help="Train once nobody has used this machine for so long."),
    click.option("--gpu-most-c", type=int, metavar="C", help="Rest while a GPU is hotter, in °C."),
    click.option("--gpu-memory", type=int, metavar="PERCENT", help="Most of a GPU's memory to take, 1 to 100."),
    click.option("--nice", type=int, metavar="N", help="Niceness of the worker, 0 to 19."),
)


def run_names(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Names of this home's runs, for completion; no file is read."""
    home = chosen_home(ctx, _param, ctx.find_root().params.get("home"))
    return sorted(path.stem for path in home.runs.glob("*.run") if path.stem.startswith(incomplete))


def home_option(command: F) -> F:
    """`--home DIR`, before or after the command's name; the command receives a Home."""
    return click.option("--home", metavar="DIR", callback=chosen_home, help="The node's folder.")(command)


def json_option(command: F) -> F:
    """`--json`: one object, or one object a line for streams; the command receives `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON (docs/json.md).")(command)


def run_option(command: F) -> F:
    """`--run NAME|ID|FILE`, for commands that take the only run of this home if it is absent."""
    help_line = "The run; the only one of this home if absent."
    return click.option("--run", "wanted", metavar="NAME|ID|FILE", shell_complete=run_names, help=help_line)(
        command
    )


def average_option(command: F) -> F:
    """`--average`, for commands that read the weights of a run."""
    help_line = "The average of final states that this node keeps (average_rounds), not the newest one."
    return click.option("--average", is_flag=True, help=help_line)(command)


def network_options(command: F) -> F:
    """All network options of `start`; the command receives their values by the names of NodeConfig's keys."""
    return _with(command, _NETWORK)


def guest_options(command: F) -> F:
    """The options of `start` that are keys of `[guest]`; the command receives their values by those names."""
    return _with(command, _GUEST)


def _with(command: F, options: Sequence[Callable[[F], F]]) -> F:
    for option in reversed(options):
        command = option(command)
    return command


def report_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--json`, and `-o FILE` for the same object; the command receives `as_json` and `report_file`.

    `--json FILE`, which was the file, still is.
    """

    @wraps(command)
    def resolved(*, as_json: bool, report_file: Path | None, old_file: Path | None, **options: Any) -> Any:
        if old_file is not None:
            if not as_json or report_file is not None:
                raise click.UsageError(f"Got unexpected extra argument ({old_file})")
            if for_people():
                click.echo("hint: --json FILE is now --output FILE", err=True)
            as_json, report_file = False, old_file
        return command(as_json=as_json, report_file=report_file, **options)

    place = click.Path(path_type=Path)
    resolved = click.argument("old_file", required=False, type=place, metavar="")(resolved)
    resolved = click.option(
        "-o", "--output", "report_file", type=place, metavar="FILE", help="Write that object to a file."
    )(resolved)
    return click.option("--json", "as_json", is_flag=True, help="Print the report as one object.")(resolved)
