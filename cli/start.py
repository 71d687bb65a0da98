"""`start`: the daemon in the foreground."""

import asyncio
import logging
import sys
from typing import Any

import click
import uvloop

from atoll.cli.options import home_option
from atoll.cli.panel import shown
from atoll.cli.run_files import find_run, keep_run
from atoll.node.config import NodeConfig, load_config
from atoll.node.daemon import Daemon
from atoll.node.home import Home, hold_lock
from atoll.node.logfile import log_handler

log = logging.getLogger(__name__)

LEVELS = ("debug", "info", "warning", "error")


@click.command()
@home_option
@click.option("--run", "wanted", metavar="NAME|ID|FILE", help="The run; the only one of this home if absent.")
@click.option("--seed", "seeds", multiple=True, metavar="MADDR", help="…/p2p/PEERID of a node to dial first.")
@click.option("--listen", metavar="MADDR", help="For example /ip4/0.0.0.0/tcp/4710.")
@click.option("--name", help="Shown in status.")
@click.option("--data", metavar="PATH", help="The text of a run whose source is file:.")
@click.option("--device", help="auto, cpu, cuda, cuda:N.")
@click.option("--threads", type=int, help="CPU threads of the worker; 0: one per core.")
@click.option("--eval-every", type=int, help="Rounds from one validation to the next.")
@click.option("--dht/--no-dht", default=None, help="Look for peers in the DHT too.")
@click.option("--log", type=click.Choice(LEVELS), help="What goes to the log file.")
@click.option("--json", "as_json", is_flag=True, help="A status a line, as JSON.")
@click.option("--plain", is_flag=True, help="Plain lines on a terminal too.")
def start(home: Home, wanted: str | None, as_json: bool, plain: bool, **flags: Any) -> None:
    """Join a run and train until stopped. Ctrl-C stops in good order, twice at once."""
    flags["seeds"] = list(flags["seeds"]) or None
    config = load_config(home.config_toml, flags)
    with hold_lock(home):
        found = find_run(home, wanted)
        keep_run(home, found)
        _begin_log(home, config)
        daemon = Daemon(home, config, found.data)
        log.info("node starts in run %s (%s), listens on %s", found.spec.name, found.spec.id.hex(), config.listen)
        with (
            shown(home, as_json=as_json, plain=plain),
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            runner.run(daemon.run())
        log.info("node ended in good order")


def _begin_log(home: Home, config: NodeConfig) -> None:
    """Everything to the file; warnings to stderr too where nobody paints a panel."""
    root = logging.getLogger()
    root.setLevel(config.log.upper())
    root.addHandler(log_handler(home.log))
    if not sys.stdout.isatty():
        stderr = logging.StreamHandler()
        stderr.setLevel(logging.WARNING)
        stderr.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        root.addHandler(stderr)
