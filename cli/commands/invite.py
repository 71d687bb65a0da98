"""`invite`: links that let others join a run through this node: make one, list them, revoke one."""

import sys
import time

import click
import segno

from atoll.cli.client import ask
from atoll.cli.commands.given_invites import list_invites, revoke
from atoll.cli.durations import Duration
from atoll.cli.formatting import print_json, span
from atoll.cli.options import OLD_SEED, home_option, json_option, with_old_seeds
from atoll.node.config.home import Home, is_locked
from atoll.node.config.node_config import load_config
from atoll.node.runs.given_invites import store_given
from atoll.node.runs.invites import EXPIRES_S, InviteOptions, invite_text, load_invite, own_seeds, reach_rank
from atoll.node.runs.run_files import FoundRun, find_run
from atoll.p2p.membership.address_book import parse_seed
from atoll.p2p.system.key_file import load_or_create
from atoll.protocols.errors import ConfigError, NotRunning
from atoll.protocols.ids import PeerId
from atoll.protocols.run.invite import EMBED_MAX_BYTES, invite_id, read_invite

QR_MAX_COLUMNS = 100
"""A code that is wider is left out: it would be broken by most terminals."""


class _InviteGroup(click.Group):
    """`atoll invite` alone, or with options, makes an invite."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["create", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_InviteGroup, context_settings={"help_option_names": ["-h", "--help"]})
def invite() -> None:
    """Invites, with which others join: `atoll start INVITE`. Without a verb: make one."""


invite.add_command(list_invites)
invite.add_command(revoke)


@invite.command()
@home_option
@json_option
@click.option("--run", "wanted", metavar="NAME|ID|FILE", help="The run; else the one that the node trains.")
@click.option("--expires", type=Duration(), default=EXPIRES_S, show_default="7d", help="For example 12h, 7d, 4w.")
@OLD_SEED
@click.option(
    "--peer",
    "seeds",
    multiple=True,
    metavar="MADDR",
    callback=with_old_seeds,
    help="Instead of this node: …/p2p/PEERID.",
)
@click.option("--for", "name", default="", help="Whom the permit is for; joiners see it.")
@click.option(
    "--members", type=click.IntRange(0), default=0, help="Most members that may join with it; 0: any number."
)
@click.option("--embed", is_flag=True, help="A long invite with the run in it, which needs no particular node.")
@click.option("--qr/--no-qr", default=None, help="Print a QR code; on terminals it is the default.")
def create(
    home: Home,
    as_json: bool,
    wanted: str | None,
    expires: int,
    seeds: tuple[str, ...],
    name: str,
    members: int,
    embed: bool,
    qr: bool | None,
) -> None:
    """Print an invite, with which others join: `atoll start INVITE`."""
    found, places = _run_and_seeds(home, wanted, list(seeds))
    if embed and len(found.data) > EMBED_MAX_BYTES:
        click.echo(
            f"the run has {len(found.data)} bytes, a link carries {EMBED_MAX_BYTES}: seeds give it", err=True
        )
    options = InviteOptions(expires_s=expires, name=name, members=members, run_file=found.data if embed else b"")
    me, kept = load_or_create(home.identity), load_invite(home, found.spec.id)
    link = invite_text(found.spec, me, places, time.time(), options=options, kept=kept)
    _warn(places)
    shown = store_given(home, link, time.time())
    if embed:
        shown = link
    if as_json:
        print_json({**about(link), "invite": shown, "id": invite_id(read_invite(link)).hex(), "link": link})
        return
    click.echo(shown)
    if sys.stdout.isatty() if qr is None else qr:
        click.echo(qr_text(shown) or f"the invite is too long for a QR code of {QR_MAX_COLUMNS} columns")
    if shown == link and not embed:
        click.echo(
            "this invite is long: a short one needs a direct address of this node, and it names none", err=True
        )
    seen = read_invite(link)
    click.echo(f"joins {found.spec.name}; valid {span(seen.expires - time.time())}; {_admission(found)}", err=True)


def about(link: str) -> dict[str, object]:
    """What `--json` shows of a link."""
    seen = read_invite(link)
    return {
        "run": seen.run.hex(),
        "signer": seen.signer,
        "expires": seen.expires,
        "seeds": list(seen.seed_texts),
        "permit": bool(seen.token),
        "embedded": bool(seen.run_file),
    }


def qr_text(link: str) -> str:
    """The link as a QR code of half blocks; empty where it would be wider than QR_MAX_COLUMNS.

    In capitals: letters, digits and the colon have a mode of their own that packs them tighter.
    """
    code = segno.make(link.upper(), error="l", micro=False)
    quiet = 2
    modules = [list(row) for row in code.matrix_iter(border=quiet)]
    if len(modules[0]) > QR_MAX_COLUMNS:
        return ""
    if len(modules) % 2:
        modules.append([0] * len(modules[0]))
    # Dark modules are blanks: on the usual dark terminal the code shows as printed, and scanners read both.
    halves = {(0, 0): "█", (0, 1): "▀", (1, 0): "▄", (1, 1): " "}
    pairs = zip(modules[::2], modules[1::2], strict=True)
    return "\n".join("".join(halves[bool(a), bool(b)] for a, b in zip(*pair, strict=True)) for pair in pairs)


def _run_and_seeds(home: Home, wanted: str | None, seeds: list[str]) -> tuple[FoundRun, list[str]]:
    for seed in seeds:
        parse_seed(seed)
    try:
        status = ask(home.root, "status")
    except NotRunning:
        if not seeds and is_locked(home):
            raise
        status = None
    found = find_run(home, wanted if wanted is not None or status is None else status["run"])
    if seeds:
        return found, seeds
    if status is None or status["run"] != found.spec.id.hex():
        raise ConfigError(
            f"no node of this home trains {found.spec.name}, so an invite would lead nowhere",
            hint="start it with `atoll start`, or name a node that does with --peer",
        )
    config = load_config(home.config_toml)
    return found, own_seeds(status["addresses"], PeerId(status["peer"]), config.seeds)


def _warn(places: list[str]) -> None:
    if not places:
        raise ConfigError("the node has no address yet", hint="try again in a moment, or give --peer")
    best = min(map(reach_rank, places))
    if best >= 2:
        where = "in your own network" if best == 2 else "on this machine"
        click.echo(f"warning: these addresses work only {where}; give --peer for a public node", err=True)


def _admission(found: FoundRun) -> str:
    mode = found.spec.admission.mode
    texts = {"open": "anybody may join, with or without it", "allowlist": "only listed peers may join"}
    return texts.get(mode, "whoever has it may join: keep it private")
