"""`doctor`: one screen of checks with pass, warn, fail or skip (not checked), and what to do about each."""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from atoll.cli.client import ask
from atoll.cli.formatting import print_json
from atoll.cli.options import home_option, json_option
from atoll.node.config.home import Home
from atoll.node.config.node_config import NodeConfig, load_config
from atoll.node.doctor import experts as doctor_experts
from atoll.node.doctor import machine as doctor_machine
from atoll.node.doctor import network as doctor_net
from atoll.node.doctor import running_node as doctor_node
from atoll.node.doctor.checks import DoctorInput, Finding, has_no_failure, run_checks
from atoll.node.runs.run_files import find_run, runs_of
from atoll.protocols.errors import AtollError, ConfigError
from atoll.protocols.run.run_spec import RunSpec

CHECKS = (*doctor_machine.CHECKS, *doctor_experts.CHECKS, *doctor_net.CHECKS, *doctor_node.CHECKS)
_STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}
_WIDTH = 10


@click.command()
@home_option
@json_option
@click.option("--run", "wanted", metavar="NAME|ID|FILE", help="Measure disk and memory by this run's needs.")
def doctor(home: Home, as_json: bool, wanted: str | None) -> int:
    """Check this machine, its network and the node: what is wrong, and what to do. Exit 1 if a check fails."""
    config, rows = _config(home)
    status, more = _status(home)
    rows += more
    given = DoctorInput(home, config, _run(home, wanted), status)
    with _logged(home):
        rows += run_checks(given, CHECKS)
    if as_json:
        print_json(rows)
    else:
        _print(rows)
    return 0 if has_no_failure(rows) else 1


def lines(rows: Sequence[Finding]) -> list[tuple[str, str]]:
    """(state or nothing, text) of each line on the screen; a remedy has a line of its own."""
    shown: list[tuple[str, str]] = []
    for row in rows:
        shown.append((row.state, f"{row.check.ljust(_WIDTH)} {row.found}"))
        if row.remedy:
            shown.append(("", f"{' ' * _WIDTH} → {row.remedy}"))
    counts = {state: sum(row.state == state for row in rows) for state in _STYLES}
    counted = f"{counts['pass']} passed, {counts['warn']} warnings, {counts['fail']} failed"
    shown.append(("", f"{counted}, {counts['skip']} not checked"))
    return shown


def _print(rows: Sequence[Finding]) -> None:
    if not sys.stdout.isatty():
        for state, text in lines(rows):
            click.echo(f"{state.ljust(4)} {text}")
        return
    console = Console(highlight=False, soft_wrap=True)
    for state, text in lines(rows):
        console.print(Text.assemble((state.ljust(4), _STYLES.get(state, "")), " ", (text, "" if state else "dim")))


@contextmanager
def _logged(home: Home) -> Iterator[None]:
    """What the checks log goes to `doctor.log` in the home, where there is one."""
    if not home.root.is_dir():
        yield
        return
    handler = logging.FileHandler(home.root / "doctor.log", delay=True)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


def _config(home: Home) -> tuple[NodeConfig | None, list[Finding]]:
    try:
        return load_config(home.config_toml), []
    except ConfigError as error:
        return None, [Finding("config", "fail", " ".join(str(error).split()), error.hint)]


def _status(home: Home) -> tuple[dict[str, Any] | None, list[Finding]]:
    """What the node says; a row if it is there but does not answer as it should."""
    try:
        return ask(home.root, "status"), []
    except AtollError as error:
        if error.exit_code == 3:
            return None, []
        return None, [Finding("node", "fail", " ".join(str(error).split()), error.hint)]


def _run(home: Home, wanted: str | None) -> RunSpec | None:
    """The run that the user named, else the only one here, else none. Raises ConfigError for a bad name."""
    if wanted is not None:
        return find_run(home, wanted).spec
    try:
        known = runs_of(home)
    except AtollError:
        return None
    return known[0].spec if len(known) == 1 else None
