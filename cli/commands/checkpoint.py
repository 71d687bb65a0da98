"""`checkpoint`: a run's whole state in files, from which any number of nodes goes on."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from atoll.cli.formatting import print_json
from atoll.cli.options import home_option, json_option, run_option
from atoll.cli.progress_line import ProgressLine
from atoll.node.config.home import Home, hold_lock
from atoll.node.runs.run_files import find_run, parse_run, store_run
from atoll.p2p.system.atomic_files import read_whole
from atoll.p2p.system.key_file import load_or_create
from atoll.protocols.codec import MESSAGE_MAX_BYTES
from atoll.protocols.errors import ConfigError, counted
from atoll.protocols.ids import short

if TYPE_CHECKING:
    from atoll.node.import_export.join_shards import ShardedCheckpoint

VERIFYING = "verifying"
_FOLDER = click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))


@click.group()
def checkpoint() -> None:
    """Save a run's weights, moments and error feedback; go on with `run new --from-checkpoint`."""


@checkpoint.command()
@_FOLDER
@home_option
@json_option
@run_option
def save(folder: Path, home: Home, as_json: bool, wanted: str | None) -> None:
    """Write what this node trains into DIR, signed. Every node does so, stopped, when all have one final round."""
    found = find_run(home, wanted)
    if not home.identity.exists():
        raise ConfigError("this home has no identity yet", hint="start the node once")
    from atoll.node.import_export.save_shard import save_shard

    with hold_lock(home), ProgressLine("writing", quiet=as_json) as line:
        identity = load_or_create(home.identity)
        shard = save_shard(found.data, home.run(found.spec.id), identity, folder, line.show)
    if as_json:
        print_json({"path": str(folder / shard.file), "shard": shard})
        return
    experts = f", experts {', '.join(map(str, sorted(shard.experts)))}" if shard.experts else ""
    click.echo(f"{folder / shard.file}: round {shard.round}, state {shard.state[:16]}{experts}")


@checkpoint.command("join")
@_FOLDER
@json_option
@click.option("--without-quorum", is_flag=True, help="Most nodes are gone: give up what they had not sent.")
def join_command(folder: Path, as_json: bool, without_quorum: bool) -> None:
    """Check the shards of all nodes in DIR, and write the manifest that makes them a checkpoint."""
    _must_be_folder(folder)
    from atoll.node.import_export.join_shards import join_shards

    with ProgressLine(VERIFYING, quiet=as_json) as line:
        found = join_shards(folder, without_quorum=without_quorum, report=partial(line.show, is_bytes=True))
    _print(found, as_json)


@checkpoint.command()
@_FOLDER
@json_option
def show(folder: Path, as_json: bool) -> None:
    """Verify a joined checkpoint and say what it holds."""
    _must_be_folder(folder)
    from atoll.node.import_export.join_shards import open_checkpoint

    with ProgressLine(VERIFYING, quiet=as_json) as line:
        found = open_checkpoint(folder, partial(line.show, is_bytes=True))
    _print(found, as_json)


@checkpoint.command("restore")
@_FOLDER
@home_option
@json_option
def restore_command(folder: Path, home: Home, as_json: bool) -> None:
    """Put this node back into the same run, which others still train: its state as DIR has it.

    Copy identity.key into the home first, where the node is one of those that saved. Never restore a node that
    runs elsewhere.
    """
    _must_be_folder(folder)
    from atoll.node.import_export.join_shards import RUN, open_checkpoint
    from atoll.node.import_export.restore_node import restore_node

    with ProgressLine(VERIFYING, quiet=as_json) as line:
        found = open_checkpoint(folder, partial(line.show, is_bytes=True))
    data = read_whole(folder / RUN, max_bytes=MESSAGE_MAX_BYTES) or b""
    run = parse_run(home, data)
    with hold_lock(home):
        store_run(home, run)  # first: with a state and a mark alone no node can be started
        me = load_or_create(home.identity).peer_id
        restored = restore_node(found, home.run(found.spec.id), me)
    if as_json:
        facts = {"path": str(home.root), "name": found.spec.name, "peer": me, "quorum": found.manifest.quorum}
        print_json({**facts, "restored": restored._asdict()})
        return
    what = "its own moments" if restored.own else "others' moments: it has no shard there"
    click.echo(f"{home.root}: {found.spec.name}, round {restored.round}, state {restored.state[:16]}")
    feed = "" if restored.feed else "; it takes its feed from the others first"
    click.echo(f"…{short(me)} starts there with {what}{feed}")
    if not found.manifest.quorum:
        click.echo(found.manifest.who_signed())


def _must_be_folder(folder: Path) -> None:
    """Before torch is imported, which takes seconds. Raises ConfigError."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}", hint="`atoll checkpoint save` writes one")


def _print(found: "ShardedCheckpoint", as_json: bool) -> None:
    manifest = found.manifest
    if as_json:
        print_json({"path": str(found.folder), "name": found.spec.name, "manifest": manifest})
        return
    click.echo(
        f"{found.folder}: {found.spec.name}, round {manifest.round}, state {manifest.state[:16]}, "
        f"{found.spec.model.parameters:,} parameters of {counted(len(manifest.shards), 'node')}"
    )
    click.echo(manifest.who_signed())
