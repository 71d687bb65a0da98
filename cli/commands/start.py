"""`start`: the daemon in the foreground, of a run of this home or of an invite.

Nothing is written before the user agreed. On a terminal `start INVITE` asks; elsewhere it needs --yes. A home that
joined with this invite before asks no more, so that the same command restarts a node for ever.
"""

import asyncio
import sys
from contextlib import ExitStack
from functools import partial
from typing import Any, get_args

import click
import uvloop
from msgspec.structs import replace

from atoll.cli.command_group import GroupedCommand
from atoll.cli.node_commands.detached import leave_terminal, start_detached
from atoll.cli.node_commands.early_worker import begin_early
from atoll.cli.options import guest_options, home_option, network_options, run_option
from atoll.node.config.home import Home, hold_lock
from atoll.node.config.loggers import LoggerName
from atoll.node.config.node_config import load_config
from atoll.node.config.roles import Role
from atoll.node.ipc.worker_pipe import EarlyWorker
from atoll.p2p.system.c_heap import use_one_arena
from atoll.p2p.system.garbage import uncollected_imports
from atoll.protocols.errors import ConfigError
from atoll.protocols.run.invite import is_invite

STDIN_MAX_CHARACTERS = 1 << 16
ANY_PORT = "localhost:0"
"""Where `--open` serves the page if neither --web nor config.toml says where."""


GROUPS = {
    "Network": (
        "seeds",
        "port",
        "listen",
        "announce",
        "port_map",
        "transport",
        "relay",
        "relay_only",
        "dht",
        "dht_bootstrap",
        "public",
    ),
    "A good guest": ("up", "down", "hours", "battery", "idle_after", "gpu_most_c", "gpu_memory", "nice"),
    "Training": ("shard", "threads", "eval_every"),
    "Output": ("web", "log", "loggers", "as_json", "plain"),
}
"""Groups of options that `--help-all` shows; the others are those of every day."""


@click.command(cls=GroupedCommand, groups=GROUPS)
@click.argument("target", metavar="INVITE|NAME@OWNER|ID", required=False)
@home_option
@run_option
@network_options
@guest_options
@click.option("--name", help="Announced to all members; none by default.")
@click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice(get_args(Role)),
    help="What the node does; several are legal. Default: train if it can.",
)
@click.option("--data", metavar="PATH", help="The text of a run whose source is file:.")
@click.option("--device", help="auto, cpu, cuda, cuda:N; several: cuda:0,cuda:1.")
@click.option("--shard", is_flag=True, default=None, help="Each of several devices holds a part of the model.")
@click.option("--threads", type=int, help="CPU threads of the worker; 0: one per core.")
@click.option("--eval-every", type=int, help="Rounds from one validation to the next.")
@click.option("--log", type=click.Choice(("debug", "info", "warning", "error")), help="What goes to the log file.")
@click.option(
    "--logger",
    "loggers",
    multiple=True,
    type=click.Choice(get_args(LoggerName)),
    help="What else gets losses and times; several are legal.",
)
@click.option("--yes", is_flag=True, help="Join INVITE without asking; needed where stdin is no terminal.")
@click.option("--json", "as_json", is_flag=True, help="A status a line, as JSON.")
@click.option("--plain", is_flag=True, help="Plain lines on a terminal too.")
@click.option(
    "--open", "opens", is_flag=True, help="Open the web page in a browser; serve it, if nothing else says where."
)
@click.option("--detach", is_flag=True, help="Return when the node is up; it goes on without this terminal.")
@click.option("--detached", is_flag=True, hidden=True)
@click.pass_context
def start(
    ctx: click.Context,
    /,
    home: Home,
    target: str | None,
    wanted: str | None,
    yes: bool,
    as_json: bool,
    plain: bool,
    opens: bool,
    detach: bool,
    detached: bool,
    **flags: Any,
) -> None:
    """Join a run and train until stopped. Ctrl-C stops in good order, twice at once.

    With INVITE (`atoll:…`, or - for stdin), or a public run of the DHT (see `atoll run find`), it shows first what
    the run costs, and asks.
    """
    config = load_config(home.config_toml, flags)
    if detach:
        start_detached(ctx, home, reads_stdin=target == "-", as_json=as_json)
        return
    if opens and not config.web:
        config = replace(config, web=ANY_PORT)
    link, wanted = _link_or_name(target, wanted)
    on_up = partial(leave_terminal, home) if detached else None

    async def run() -> None:
        worker = EarlyWorker()
        with ExitStack() as lock:
            # First, so that `stop` finds this node. A new home is made, and locked, after the user agreed.
            if has_home := home.root.exists():
                lock.enter_context(hold_lock(home))
            try:
                await begin_early(home, config, worker)
                with uncollected_imports():
                    from atoll.cli.node_commands.running import run_node

                await run_node(
                    home, config, link, wanted, on_up=on_up, worker=worker, lock=None if has_home else lock,
                    yes=yes, as_json=as_json, plain=plain, opens=opens,
                )  # fmt: skip
            finally:
                await worker.end()

    use_one_arena()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(run())
        except asyncio.CancelledError:  # a signal before there was a node to stop
            raise click.Abort from None


def _link_or_name(target: str | None, wanted: str | None) -> tuple[str | None, str | None]:
    """A link, from stdin for `-`, or else what the run is called. Raises ConfigError."""
    if target is None:
        return None, wanted
    if wanted is not None:
        raise ConfigError("the run is named twice", hint="drop --run")
    text = sys.stdin.read(STDIN_MAX_CHARACTERS) if target == "-" else target
    return (text, None) if target == "-" or is_invite(text) else (None, text)
