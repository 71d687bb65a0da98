"""`run rm`: deletes a run of this home, after the user saw how much that is."""

import sys

import click

from atoll.cli.client import ask
from atoll.cli.formatting import print_json, size
from atoll.node.config.home import Home
from atoll.node.import_export.remove_run import Removal, planned, remove, unused
from atoll.node.runs.run_files import find_run
from atoll.protocols.errors import ConfigError, NotRunning, counted

MARKED = "joined again with this identity, the node first waits for its own entries from the others"


def remove_run(wanted: str, home: Home, *, as_json: bool, yes: bool) -> None:
    """Delete a run of this home, once the user agreed or said yes. Raises ConfigError, DiskFault."""
    found = find_run(home, wanted)
    with unused(home, found, _running(home)):
        removal = planned(home, found)
        if not removal.paths:
            raise ConfigError(
                f"this home has nothing of {found.spec.name!r}", hint=f"{found.path} is yours to delete"
            )
        _agree(removal, yes)
        is_marked = remove(home, found, removal)
    if as_json:
        print_json(removal._asdict() | {"marked": is_marked})
        return
    click.echo(f"deleted {_amount(removal)} of {removal.name}")
    if is_marked:
        click.echo(MARKED)


def _running(home: Home) -> str | None:
    """Id of the run that the node of this home trains, hex; None if no node answers."""
    try:
        return str(ask(home.root, "status")["run"])
    except NotRunning:
        return None


def _agree(removal: Removal, yes: bool) -> None:
    click.echo("\n".join([f"{removal.name}  {removal.run[:16]}", *removal.paths]), err=True)
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError("nobody is here to agree to this: stdin is no terminal", hint="give --yes to delete")
    if not click.confirm(f"Delete {_amount(removal)}? There is no way back.", default=False, err=True):
        raise click.exceptions.Exit(1)


def _amount(removal: Removal) -> str:
    return f"{counted(removal.files, 'file')} with {size(removal.bytes)}"
