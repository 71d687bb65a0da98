"""What `doctor` finds, for its screen and for a bug report."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from atoll.cli.client import ask
from atoll.node.config.home import Home
from atoll.node.config.node_config import NodeConfig, load_config
from atoll.node.doctor import experts as doctor_experts
from atoll.node.doctor import guest as doctor_guest
from atoll.node.doctor import machine as doctor_machine
from atoll.node.doctor import network as doctor_net
from atoll.node.doctor import running_node as doctor_node
from atoll.node.doctor.checks import DoctorInput, Finding, run_checks
from atoll.node.runs.run_files import find_run, runs_of
from atoll.protocols.errors import AtollError, ConfigError, NotRunning
from atoll.protocols.run.run_spec import RunSpec

CHECKS = (
    *doctor_machine.CHECKS,
    *doctor_guest.CHECKS,
    *doctor_experts.CHECKS,
    *doctor_net.CHECKS,
    *doctor_node.CHECKS,
)


def findings(home: Home, wanted: str | None = None) -> list[Finding]:
    """A row for each check of this machine, its network and the node. Raises ConfigError for a bad run."""
    config, rows = _config(home)
    status, more = _status(home)
    given = DoctorInput(home, config, _run(home, wanted), status)
    with _logged(home):
        found = run_checks(given, CHECKS)
    return [*rows, *more, *found]


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
    """What the node says; a row if none does, with the reason."""
    try:
        return ask(home.root, "status"), []
    except NotRunning as error:
        return None, [Finding("node", "warn", f"{error}: NAT, relay and DHT cannot be seen", error.hint)]
    except AtollError as error:
        # A node that does not answer is no node that does not run.
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
