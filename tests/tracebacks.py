"""Exceptions that nobody caught, in the logs that nodes left: a user must never see one (docs/chaos.md)."""

import re
from collections.abc import Iterator
from pathlib import Path

UNCAUGHT = re.compile(
    r"Traceback \(most recent call last\):|Fatal Python error: .*|Task was destroyed but it is pending!.*"
    r"|coroutine .* was never awaited"
)
BEGINS = "Traceback"
WORDS_MOST = 200


def tracebacks(folder: Path) -> list[str]:
    """Return a line for each exception in a log below `folder`: the log, and what was raised.

    Logs are all files named `*.log` or `*.log.N`: what a daemon printed, what it logged, and its workers'.
    """
    logs = sorted(path for path in folder.rglob("*.log*") if path.is_file())
    return [f"{log.relative_to(folder)}: {words}" for log in logs for words in dict.fromkeys(uncaught_in(log))]


def uncaught_in(log: Path) -> Iterator[str]:
    """Yield `a traceback, KeyError: 3` for each exception in one log, `Fatal Python error: …` for each crash."""
    # In node.log, which is JSON, a line holds all lines of its traceback.
    text = log.read_text(errors="replace").replace("\\n", "\n")
    for found in UNCAUGHT.finditer(text):
        if not found[0].startswith(BEGINS):
            yield found[0][:WORDS_MOST]
            continue
        below = text[found.end() :].lstrip("\n").splitlines()
        raised = next((line for line in below if line and not line.startswith((" ", "\t"))), "cut off")
        yield f"a traceback, {raised[:WORDS_MOST]}"
