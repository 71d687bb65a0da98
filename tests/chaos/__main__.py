"""`make chaos`: real nodes through faults, judged by the oracle (docs/chaos.md).

    python -m tests.chaos [--only kills,power] [--seed 1] [--full] [--keep FOLDER]
    python -m tests.chaos --judge FOLDER        the homes in FOLDER, of any run that is over

Prints a line for each case, and how to play it again where it failed. Exit code 1 if a promise is broken, if a
node left a traceback in a log, or if a case could not be run or shows nothing; 2 where there is nothing to judge.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from atoll.cli.sim.homes import read_homes
from atoll.cli.sim.oracle import judge
from atoll.protocols.errors import AtollError
from tests.chaos import apart_cases, disk_cases, kill_cases, memory_cases, net_cases, power_cases
from tests.chaos.loop_image import PREFIX, sweep
from tests.chaos.report import NotRun, Result
from tests.chaos.soak import soak
from tests.chaos.version_cases import versions
from tests.tracebacks import tracebacks

Case = Callable[[Path, int, bool], Result]
"""Plays in a folder, by a seed, in full or in short."""
CASES: dict[str, Case] = {
    "kills": kill_cases.kills,
    "all-die": kill_cases.all_die,
    "frozen": kill_cases.frozen,
    "power": power_cases.power,
    "steps": disk_cases.steps,
    "eio": disk_cases.eio,
    "eio-reads": disk_cases.eio_reads,
    "clock": disk_cases.clock,
    "clock-jumps": disk_cases.clock_jumps,
    "oom": memory_cases.oom,
    "versions": versions,
    "soak": soak,
    **net_cases.CASES,
    **apart_cases.CASES,
}
LEFT_OUT = {
    "apart-halves": "takes a quarter of an hour, and missed bars (docs/chaos.md): --only apart-halves --full",
    "apart-minority": "takes 20 minutes, and missed a bar (docs/chaos.md): --only apart-minority --full",
    "soak": "says nothing in minutes: --only soak --full takes 62 to 77 minutes",
}
"""Cases that `make chaos` names and does not run, with the reason; `--only` runs them."""


def main(arguments: Sequence[str]) -> int:
    """Run what was asked for; the exit code."""
    parser = argparse.ArgumentParser("python -m tests.chaos")
    parser.add_argument("--only", default=",".join(name for name in CASES if name not in LEFT_OUT))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--minutes", type=float, help="measured minutes of a soak")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="an empty folder for the homes, which stay")
    parser.add_argument("--judge", type=Path, metavar="FOLDER")
    given = parser.parse_args(arguments)
    if given.judge is not None:
        return judged(given.judge)
    names = given.only.split(",")
    if unknown := set(names) - CASES.keys():
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    for place in sweep():
        print(f"unmounted {place}, which a killed case left", file=sys.stderr)
    for name in LEFT_OUT if given.only == parser.get_default("only") else ():
        print(f"LEFT OUT {name:12} {LEFT_OUT[name]}")
    cases = CASES | {"soak": partial(soak, minutes=given.minutes)} if given.minutes else CASES
    results = [played(cases[name], name, given) for name in names]
    counts = [sum(result.holds for result in results), sum(not result.is_run for result in results)]
    print(f"{counts[0]} of {len(results)} cases hold, {counts[1]} not run")
    return 0 if all(result.holds for result in results) else 1


def played(case: Case, name: str, given: argparse.Namespace) -> Result:
    """Play a case, print its lines, and return what came of it."""
    began = time.monotonic()
    with folder_of(name, given.keep) as folder:
        result = outcome(case, name, folder, given.seed, full=given.full)
    result.seen += f" ({time.monotonic() - began:.0f} s)"
    words = [" --full"] if given.full else []
    words += [f" --minutes {given.minutes:g}"] if given.minutes and name == "soak" else []
    print("\n".join(result.lines("".join(words))), flush=True)
    return result


def outcome(case: Case, name: str, folder: Path, seed: int, *, full: bool = False) -> Result:
    """Play a case in a folder; what came of it, tracebacks in the logs of its nodes included."""
    try:
        result = case(folder, seed, full)
    except NotRun as reason:
        return Result(name, seed, str(reason), is_run=False)
    except (AtollError, AssertionError) as error:
        result = Result(name, seed, "it came to no end", [str(error)])
    result.broken += tracebacks(folder)
    return result


@contextmanager
def folder_of(name: str, keep: Path | None) -> Iterator[Path]:
    """Where a case plays: a folder of `keep`, or one that is removed afterwards."""
    if keep is not None:
        (keep / name).mkdir(parents=True)
        yield keep / name
        return
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-") as folder:
        yield Path(folder)


def judged(folder: Path) -> int:
    """Print the oracle's verdict over the homes in a folder, and the tracebacks there; the exit code."""
    try:
        verdict = judge(read_homes(folder))
    except AtollError as error:
        print(error.line(), file=sys.stderr)
        return 2
    broken = [*map(str, verdict.violations), *tracebacks(folder)]
    for line in broken:
        print(line)
    print(verdict.line)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
