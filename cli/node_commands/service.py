"""`service install | uninstall | show`: the node as a service of this user, by systemd or launchd."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click

from atoll.cli.formatting import print_json
from atoll.cli.options import home_option, json_option, run_names
from atoll.node.config.home import Home, home_at, is_locked
from atoll.node.runs.run_files import find_run
from atoll.node.service.units import Service, launchd_list, node_command, systemd_unit
from atoll.p2p.system.atomic_files import disk, make_folder, write_whole
from atoll.protocols.errors import ConfigError, LocalFault

MANAGER_S = 60.0
"""Deadline of one command of the service manager."""
RUN = click.option(
    "--run",
    "wanted",
    metavar="NAME|ID",
    shell_complete=run_names,
    help="The run; the only one of this home if absent.",
)


class Installed(NamedTuple):
    """A service's file, and what its manager is told when the file came, or before it goes."""

    path: Path
    data: bytes
    after: tuple[tuple[str, ...], ...]
    before_removal: tuple[tuple[str, ...], ...]
    after_removal: tuple[tuple[str, ...], ...]
    hint: str


@click.group()
def service() -> None:
    """The node as a service of this user: it starts with the machine, and again when it fails."""


@service.command()
@home_option
@json_option
@RUN
def install(home: Home, as_json: bool, wanted: str | None) -> None:
    """Write the service's file and start it. Its settings are those of config.toml."""
    found = _service(home, wanted)
    if found.path.exists():
        _tell_all(found.before_removal, found.path)
    elif is_locked(home):
        raise ConfigError(f"a node already runs in {home.root}", hint="`atoll stop --wait` first")
    make_folder(found.path.parent)
    write_whole(found.path, found.data, mode=0o644)
    for command in found.after:
        _tell(command, found.path)
    _print(found, as_json, f"installed and started: {found.path}\n{found.hint}")


@service.command()
@home_option
@json_option
def uninstall(home: Home, as_json: bool) -> None:
    """Stop the service and remove its file. The home stays."""
    found = _place(home, ())
    if not found.path.exists():
        raise ConfigError(f"there is no service of {home.root}", hint="`atoll service install` makes one")
    _tell_all(found.before_removal, found.path)
    with disk(found.path):
        found.path.unlink()
    _tell_all(found.after_removal, found.path)
    _print(found, as_json, f"stopped and removed: {found.path}")


@service.command()
@home_option
@json_option
@RUN
def show(home: Home, as_json: bool, wanted: str | None) -> None:
    """Print what `install` would write; nothing is changed."""
    found = _service(home, wanted)
    _print(found, as_json, f"# {found.path}\n{found.data.decode()}".rstrip())


def _service(home: Home, wanted: str | None) -> Installed:
    """The service of a run that this home has. Raises ConfigError where it has none, or several."""
    run = find_run(home, wanted)
    return _place(home, node_command(sys.executable, home.root, run.spec.id.hex()))


def _place(home: Home, command: tuple[str, ...]) -> Installed:
    is_default = home.root == home_at(None, {}).root
    found = Service(home.root, command, is_default)
    return _launchd(found) if sys.platform == "darwin" else _systemd(found)


def _systemd(service: Service) -> Installed:
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    unit = f"{service.name}.service"
    control = ("systemctl", "--user")
    return Installed(
        path=folder / "systemd" / "user" / unit,
        data=systemd_unit(service).encode(),
        after=((*control, "daemon-reload"), (*control, "enable", unit), (*control, "restart", unit)),
        before_removal=((*control, "disable", "--now", unit),),
        after_removal=((*control, "daemon-reload"),),
        hint="to let it run while you are not logged in: loginctl enable-linger",
    )


def _launchd(service: Service) -> Installed:
    path = Path.home() / "Library" / "LaunchAgents" / f"{service.name}.plist"
    domain = f"gui/{os.getuid()}"
    return Installed(
        path=path,
        data=launchd_list(service),
        after=(("launchctl", "bootstrap", domain, str(path)),),
        before_removal=(("launchctl", "bootout", f"{domain}/{service.name}"),),
        after_removal=(),
        hint="it runs while you are logged in",
    )


def _tell(command: Sequence[str], path: Path) -> None:
    """Run a command of the service manager. Raises LocalFault with what to do by hand."""
    said = " ".join(command)
    if shutil.which(command[0]) is None:
        raise LocalFault(
            f"there is no {command[0]} here; the file is {path}", hint="start it with what this system has"
        )
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=MANAGER_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise LocalFault(f"`{said}` did not end within {MANAGER_S:.0f} s", hint="try it by hand") from error
    if ran.returncode:
        words = " ".join(ran.stderr.split()) or f"exit code {ran.returncode}"
        raise LocalFault(f"`{said}` failed: {words}; the file is {path}", hint="try it by hand")


def _tell_all(commands: Sequence[Sequence[str]], path: Path) -> None:
    """Run what ends a service. A service that the manager does not know any more is no reason to keep its file."""
    for command in commands:
        try:
            _tell(command, path)
        except LocalFault as error:
            click.echo(f"warning: {error.line()}", err=True)


def _print(found: Installed, as_json: bool, text: str) -> None:
    if as_json:
        print_json({"path": str(found.path), "installed": found.path.exists(), "text": found.data.decode()})
    else:
        click.echo(text)
