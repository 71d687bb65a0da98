"""Runs the checks of `atoll doctor`, each in its own thread with a deadline, so that none holds up the rest.

A check is a function from a DoctorInput to findings. An error that it raises becomes a finding: an AtollError with
its hint, any other with its text, and a traceback in the log.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec

from atoll.node.config.home import Home
from atoll.node.config.node_config import NodeConfig
from atoll.protocols.errors import AtollError
from atoll.protocols.run.run_spec import RunSpec

log = logging.getLogger(__name__)

CheckState = Literal["pass", "warn", "fail", "skip"]
"""`skip`: not checked, because it is switched off or there is nothing to check; never counted as passed."""


class Finding(msgspec.Struct, frozen=True):
    """One row of the report: what a check found, and what to do about it."""

    check: str
    state: CheckState
    found: str
    remedy: str = ""
    """What the user should do; empty if there is nothing to do."""


@dataclass(frozen=True)
class DoctorInput:
    """What the checks examine."""

    home: Home
    config: NodeConfig | None
    """None if config.toml cannot be read."""
    run: RunSpec | None = None
    """The run whose needs of disk and memory are checked; None if there is not exactly one."""
    status: dict[str, Any] | None = None
    """The running node's status as `atoll status --json` prints it; None if no node answers."""


class DoctorCheck(NamedTuple):
    """A named check with its deadline."""

    name: str
    deadline_s: float
    work: Callable[[DoctorInput], Iterable[Finding]]


def run_checks(given: DoctorInput, checks: Sequence[DoctorCheck]) -> list[Finding]:
    """The findings of all checks, which run at the same time, in the order of `checks`."""
    done: dict[int, list[Finding]] = {}

    def work(number: int, check: DoctorCheck) -> None:
        done[number] = run_check(given, check)

    # Daemon threads, because a disk that never answers must hold up neither the other checks nor the exit.
    threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in enumerate(checks)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    rows: list[Finding] = []
    for number, (check, thread) in enumerate(zip(checks, threads, strict=True)):
        thread.join(max(0.0, started + check.deadline_s - time.monotonic()))
        rows += done[number] if number in done else [_late(check)]
    return rows


def run_check(given: DoctorInput, check: DoctorCheck) -> list[Finding]:
    """The findings of one check; any error that it raises becomes one."""
    try:
        return list(check.work(given))
    except AtollError as error:
        return [Finding(check.name, "fail", " ".join(str(error).split()), error.hint)]
    except Exception as error:  # a bug in one check must not hide what the others found
        log.exception("the check %s failed", check.name)
        return [Finding(check.name, "fail", f"{type(error).__name__}: {error}", "please report this as a bug")]


def has_no_failure(rows: Iterable[Finding]) -> bool:
    """Whether no check failed; warnings, and checks that did not run, are allowed."""
    return all(row.state != "fail" for row in rows)


def _late(check: DoctorCheck) -> Finding:
    remedy = "this part of the machine hangs, or is very busy: try again"
    return Finding(check.name, "fail", f"no result in {check.deadline_s:.0f} s", remedy)
