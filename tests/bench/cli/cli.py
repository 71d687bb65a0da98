"""`bench cli`: the start of light commands, in turns with `python -c pass`, by the clock and by CPU time."""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from atoll.protocols.errors import LocalFault
from atoll_bench.report import Bar, Row, median, paired_ratio, row

TURNS, QUICK_TURNS = 41, 5
START_S = Bar("<=", 0.3)
"""On a machine that has nothing else to do."""
CPU_RATIOS = {"--help": Bar("<=", 7.0), "status": Bar("<=", 12.0)}
"""CPU time over that of `python -c pass`: other work on the machine slows both."""
BARE = "python -c pass"
NOT_RUNNING = 3


class Start(NamedTuple):
    """One process from its start to its end."""

    wall_s: float
    cpu_s: float
    """In the process and in the kernel for it."""


async def measure(quick: bool, say: Callable[[str], None]) -> list[Row]:
    """Two rows for each light command. Raises LocalFault."""
    script = Path(sys.executable).with_name("atoll")
    if not script.exists():
        raise LocalFault(f"no {script}", hint="`make setup`")
    with tempfile.TemporaryDirectory(prefix="atoll-cli-") as home:
        commands = light_commands(sys.executable, str(script), home)
        say(f"{QUICK_TURNS if quick else TURNS} turns of {', '.join(commands)}")
        starts = await asyncio.to_thread(in_turns, commands, QUICK_TURNS if quick else TURNS, Path(home))
    return rows_of(starts)


def light_commands(python: str, script: str, home: str) -> dict[str, Sequence[str]]:
    """The commands by name; no node runs in `home`."""
    return {
        BARE: (python, "-c", "pass"),
        "--help": (script, "--help"),
        "status": (script, "status", "--home", home),
    }


def in_turns(commands: Mapping[str, Sequence[str]], turns: int, folder: Path) -> dict[str, list[Start]]:
    """Starts of each command in `folder`, one after the other; the first turn warms up and is left out."""
    starts: dict[str, list[Start]] = {name: [] for name in commands}
    names = list(commands)
    for turn in range(turns + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = start_of(commands[name], folder, expected=NOT_RUNNING if name == "status" else 0)
            if turn:
                starts[name].append(start)
    return starts


def start_of(command: Sequence[str], folder: Path, *, expected: int) -> Start:
    """Run `command` to its end; its output is dropped. Raises LocalFault for another status than `expected`."""
    silent = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2)]
    began = time.perf_counter()
    pid = os.posix_spawn("/usr/bin/env", ["env", "-C", str(folder), *command], os.environ, file_actions=silent)
    _, status, usage = os.wait4(pid, 0)
    wall_s = time.perf_counter() - began
    if os.waitstatus_to_exitcode(status) != expected:
        raise LocalFault(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
    return Start(wall_s, usage.ru_utime + usage.ru_stime)


def cpu_ratio(starts: Mapping[str, Sequence[Start]], name: str) -> float | None:
    """CPU time of a command over that of `python -c pass`: median over the turns."""
    return paired_ratio([start.cpu_s for start in starts[name]], [start.cpu_s for start in starts[BARE]])


def rows_of(starts: Mapping[str, Sequence[Start]]) -> list[Row]:
    """The table."""
    rows = [row(BARE, median([start.wall_s for start in starts[BARE]]), "s")]
    for name, bar in CPU_RATIOS.items():
        rows.append(row(f"atoll {name}", median([start.wall_s for start in starts[name]]), "s", START_S))
        rows.append(row(f"atoll {name}: CPU / {BARE}", cpu_ratio(starts, name), "x", bar))
    return rows
