"""`start`: the daemon in the foreground."""

import asyncio
import logging
import sys
import time
from typing import Any

import click
import uvloop

from atoll.cli.commands.join import invited_run, keep, link_from, with_seeds
from atoll.cli.live_panel import Words, seed_lines, shown
from atoll.cli.network_options import network_options
from atoll.cli.options import home_option
from atoll.cli.run_files import FoundRun, find_run
from atoll.node.config.home import Home, hold_lock
from atoll.node.config.node_config import NodeConfig, load_config
from atoll.node.daemon.app import Daemon
from atoll.node.daemon.feed_recovery import marked
from atoll.node.daemon.telemetry.logfile import log_handler
from atoll.node.runs.invites import check_admission, invite_text, kept_invite, own_seeds, reach
from atoll.p2p.ledger.store import LEDGER_FILE
from atoll.p2p.system.key_file import load_or_create
from atoll.protocols.errors import ConfigError
from atoll.protocols.identity import Identity
from atoll.protocols.local.control_messages import Status

log = logging.getLogger(__name__)

LEVELS = ("debug", "info", "warning", "error")


@click.command()
@click.argument("invite", required=False)
@home_option
@click.option("--run", "wanted", metavar="NAME|ID|FILE", help="The run; the only one of this home if absent.")
@network_options
@click.option("--name", help="Shown in status.")
@click.option("--data", metavar="PATH", help="The text of a run whose source is file:.")
@click.option("--device", help="auto, cpu, cuda, cuda:N; several: cuda:0,cuda:1.")
@click.option("--shard", is_flag=True, default=None, help="Each of several devices holds a part of the model.")
@click.option("--threads", type=int, help="CPU threads of the worker; 0: one per core.")
@click.option("--eval-every", type=int, help="Rounds from one validation to the next.")
@click.option("--log", type=click.Choice(LEVELS), help="What goes to the log file.")
@click.option("--yes", is_flag=True, help="Join INVITE without asking; needed where stdin is no terminal.")
@click.option("--json", "as_json", is_flag=True, help="A status a line, as JSON.")
@click.option("--plain", is_flag=True, help="Plain lines on a terminal too.")
def start(
    home: Home, invite: str | None, wanted: str | None, yes: bool, as_json: bool, plain: bool, **flags: Any
) -> None:
    """Join a run and train until stopped. Ctrl-C stops in good order, twice at once.

    With INVITE (`atoll:…`, or - for stdin) it shows first what the run costs, and asks.
    """
    config = load_config(home.config_toml, flags)
    link = _link(invite, wanted)
    found = find_run(home, wanted) if link is None else invited_run(home, config, link, time.time(), yes=yes)
    with hold_lock(home):
        keep(home, found, link)
        config = with_seeds(home, found, config)
        _check_admitted(home, found)
        _begin_log(home, config)
        daemon = Daemon(home, config, found.data)
        log.info("node starts in run %s (%s)", found.spec.name, found.spec.id.hex())
        with (
            shown(home, as_json=as_json, plain=plain, words=_words(found, daemon.identity, config)),
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            runner.run(daemon.run())
        log.info("node ended in good order")


def _link(invite: str | None, wanted: str | None) -> str | None:
    if invite is None:
        return None
    if wanted is not None:
        raise ConfigError("an invite names its run", hint="drop --run")
    return link_from(invite)


def _check_admitted(home: Home, found: FoundRun) -> None:
    """Refuse at once what peers would refuse. Who worked in the run before has shown its permit already."""
    folder = home.run(found.spec.id)
    lost = marked(folder)
    if not (folder / LEDGER_FILE).exists() and (lost is None or lost.entries == 0):
        me = load_or_create(home.identity).peer_id
        check_admission(found.spec, me, kept_invite(home, found.spec.id), time.time())


def _words(found: FoundRun, me: Identity, config: NodeConfig) -> Words:
    """An owner is shown a link, where it can lead to a member; others the addresses.

    A link that holds a permit is a secret: it is shown on terminals and stays out of log files.
    """
    spec = found.spec

    def words(now: Status) -> list[str]:
        if spec.owner != me.peer_id:
            return seed_lines(now)
        if spec.admission.mode == "invite" and not sys.stdout.isatty():
            return ["others join with an invite: `atoll invite`"]
        seeds = own_seeds(now.addresses, me.peer_id, config.seeds)
        where = ("", "", " in this network", " on this machine")[min(map(reach, seeds))]
        return [f"others join{where} with: node start {invite_text(spec, me, seeds, time.time())}"]

    return words


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
