"""Commands with a deadline: their output, or one Failed that says what they said last."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[2]

END_S = 15.0

T = TypeVar("T")


class Failed(Exception):
    """The story cannot go on, or one of its promises does not hold."""


def run(*command: str, within_s: float, env: Mapping[str, str] | None = None) -> str:
    """The standard output, stripped. Raises Failed."""
    name = " ".join(command[:4])
    try:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise Failed(f"{command[0]} is not installed") from error
    with process:
        try:
            out, fault = process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired as error:
            _end(process)
            raise Failed(f"`{name} …` took more than {within_s:.0f} s") from error
        except BaseException:
            _end(process)
            raise
    if process.returncode != 0:
        words = (fault.strip() or out.strip() or "it said nothing").splitlines()
        raise Failed(f"`{name} …` ended with {process.returncode}:\n  " + "\n  ".join(words[-15:]))
    return out.strip()


def _end(process: subprocess.Popen[str]) -> None:
    """With its children, which are a group of their own: a script is given time to clean up."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=END_S)
            return


def tried(*command: str, within_s: float, env: Mapping[str, str] | None = None) -> str | None:
    """As `run`, or None where that fails."""
    try:
        return run(*command, within_s=within_s, env=env)
    except Failed:
        return None


def until(look: Callable[[], T | None], *, within_s: float, every_s: float, what: str) -> T:
    """What `look` returns once that is not None. Raises Failed after `within_s`."""
    deadline = time.monotonic() + within_s
    while True:
        found = look()
        if found is not None:
            return found
        if time.monotonic() > deadline:
            raise Failed(f"{what}: not within {within_s:.0f} s")
        time.sleep(every_s)
