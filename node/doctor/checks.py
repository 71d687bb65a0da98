"""Runs the checks of `atoll doctor`: each in a thread of its own with a deadline, so that none can spoil the rest.

A check is a function from a Patient to rows. What it raises becomes a row: faults of ours with their hint, bugs
with their text (and a traceback in the log).
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from atoll.node.config.home import Home
from atoll.node.config.node_config import NodeConfig
from atoll.protocols.errors import AtollError
from atoll.protocols.run.run_spec import RunSpec

log = logging.getLogger(__name__)

State = Literal["pass", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True):
    """One finding."""

    check: str
    state: State
    found: str
    remedy: str = ""
    """What the user does next; empty when there is nothing to do."""


@dataclass(frozen=True)
class Patient:
    """What is examined."""

    home: Home
    config: NodeConfig | None
    """None: it cannot be read."""
    run: RunSpec | None = None
    """For what it needs of disk and memory."""
    status: dict[str, Any] | None = field(default=None)
    """The running node's status as `atoll status --json` shows it; None: no node answers."""


class DoctorCheck(NamedTuple):
    """One function that finds something out."""

    name: str
    deadline_s: float
    work: Callable[[Patient], Iterable[Finding]]


def examine(patient: Patient, checks: Sequence[DoctorCheck]) -> list[Finding]:
    """All rows in the order of `checks`, which run side by side."""
    done: dict[int, list[Finding]] = {}

    def work(number: int, check: DoctorCheck) -> None:
        done[number] = guarded(patient, check)

    # Daemon threads: a disk that never answers holds up neither the others nor our end.
    threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in enumerate(checks)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    rows: list[Finding] = []
    for number, (check, thread) in enumerate(zip(checks, threads, strict=True)):
        thread.join(max(0.0, started + check.deadline_s - time.monotonic()))
        rows += done[number] if number in done else [_late(check)]
    return rows


def guarded(patient: Patient, check: DoctorCheck) -> list[Finding]:
    """The rows of one check, whatever happens in it."""
    try:
        return list(check.work(patient))
    except AtollError as error:
        return [Finding(check.name, "fail", " ".join(str(error).split()), error.hint)]
    except Exception as error:  # a bug in one check must not hide what the others found
        log.exception("the check %s failed", check.name)
        return [Finding(check.name, "fail", f"{type(error).__name__}: {error}", "please report this as a bug")]


def is_well(rows: Iterable[Finding]) -> bool:
    """Nothing failed; warnings are allowed."""
    return all(row.state != "fail" for row in rows)


def _late(check: DoctorCheck) -> Finding:
    remedy = "this part of the machine hangs, or is very busy: try again"
    return Finding(check.name, "fail", f"no result in {check.deadline_s:.0f} s", remedy)
