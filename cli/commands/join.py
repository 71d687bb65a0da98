"""From an invite to a run that this home knows: read the link, get the run, show what it costs, ask, and keep it.

Nothing is written before the user agreed. On a terminal `start INVITE` asks; elsewhere it needs --yes. A home that
joined with this run before asks no more, so that the same command restarts a node for ever.
"""

import asyncio
import sys
from collections.abc import Callable

import click
import msgspec
import uvloop

from atoll.cli.preview_lines import preview_lines
from atoll.cli.run_files import FoundRun, check_room, keep_run, run_of, with_id
from atoll.node.config.home import Home
from atoll.node.config.node_config import MAX_SEEDS, NodeConfig
from atoll.node.runs.capacity.expert_capacity import room_of
from atoll.node.runs.capacity.free_resources import free_here
from atoll.node.runs.capacity.join_preview import preview_of
from atoll.node.runs.fetch_run import run_from_seeds
from atoll.node.runs.invites import check_admission, keep_invite, kept_invite
from atoll.p2p.system.key_file import load_or_create
from atoll.protocols.errors import ConfigError, DecodeError
from atoll.protocols.run.invite import Invite, decode_invite, is_invite, read_invite

STDIN_MAX_CHARACTERS = 1 << 16


class Declined(click.ClickException):
    """The user said no."""

    exit_code = 1

    def show(self, file: object = None) -> None:
        """One line; a decision is no error."""
        click.echo(self.message, err=True)


def link_from(argument: str) -> str:
    """The link itself, or from stdin for `-`. Raises ConfigError for what is no invite."""
    link = sys.stdin.read(STDIN_MAX_CHARACTERS) if argument == "-" else argument
    if not is_invite(link):
        raise ConfigError(
            "this is not an invite: an invite begins with atoll:",
            hint="to start a run of this home give --run NAME",
        )
    return link


def invited_run(home: Home, config: NodeConfig, link: str, unix_s: float, *, yes: bool) -> FoundRun:
    """The run that `link` invites to, after the user agreed. Raises ConfigError, LocalFault, Declined."""
    known = _joined_before(home, link)
    if known is not None:
        return known
    invite = _decoded(lambda: decode_invite(link, unix_s))
    found = _get_run(home, invite)
    me = load_or_create(home.identity).peer_id if home.identity.exists() else None
    check_admission(found.spec, me, invite, unix_s)
    free = free_here(home.root, config.device)
    costs = preview_of(found.spec, config, room_of(found.spec, config, free))
    lines = preview_lines(found.spec, invite, costs, free, config, unix_s)
    click.echo("\n".join(lines), err=True)
    _agree(yes)
    return found


def keep(home: Home, found: FoundRun, link: str | None) -> None:
    """Write the run, and the invite that led to it, into the home. Raises ConfigError, DiskFault."""
    keep_run(home, found)
    if link is not None:
        keep_invite(home, found.spec.id, link)


def with_seeds(home: Home, found: FoundRun, config: NodeConfig) -> NodeConfig:
    """The user's seeds, then those of the invite that this home joined the run with."""
    invite = kept_invite(home, found.spec.id)
    seeds = tuple(dict.fromkeys((*config.seeds, *(invite.seed_texts if invite else ()))))
    return msgspec.structs.replace(config, seeds=seeds[:MAX_SEEDS])


def _joined_before(home: Home, link: str) -> FoundRun | None:
    invite = _decoded(lambda: read_invite(link))
    if kept_invite(home, invite.run) != invite:
        return None
    return with_id(home, invite.run)


def _decoded(read: Callable[[], Invite]) -> Invite:
    try:
        return read()
    except DecodeError as error:
        raise ConfigError(str(error), hint=error.hint) from error


def _get_run(home: Home, invite: Invite) -> FoundRun:
    known = with_id(home, invite.run)
    if known is not None:
        return known
    data = invite.run_file or _fetched(invite)
    found = run_of(home, data)
    if found.spec.id != invite.run:
        raise ConfigError("the run inside the invite is not the one that it names", hint="ask for another invite")
    check_room(home, found)
    return found


def _fetched(invite: Invite) -> bytes:
    count = len(invite.seeds)
    click.echo(f"asking {count} seed{'s' * (count != 1)} for the run …", err=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run_from_seeds(invite, lambda line: click.echo(line, err=True)))


def _agree(yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError("nobody is here to agree to this: stdin is no terminal", hint="give --yes to join")
    if not click.confirm("Join?", default=True, err=True):
        raise Declined("not joined; nothing was written")
