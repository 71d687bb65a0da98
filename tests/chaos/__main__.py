"""`make chaos`: real nodes through faults, judged by the oracle (docs/chaos.md).

    python -m tests.chaos [--only kills,power] [--seed 1] [--full]
    python -m tests.chaos --judge FOLDER        the homes in FOLDER, of any run that is over

Prints a line for each case, and how to play it again where it failed. Exit code 1 if a promise is broken or a case
could not be run, 2 where there is nothing to judge.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from atoll.cli.sim.homes import read_homes
from atoll.cli.sim.oracle import judge
from atoll.protocols.errors import AtollError
from tests.chaos import disk_cases, kill_cases, net_cases, power_cases
from tests.chaos.loop_image import PREFIX, sweep
from tests.chaos.report import NotRun, Result

Case = Callable[[Path, int, bool], Result]
"""Plays in a folder, by a seed, in full or in short."""
CASES: dict[str, Case] = {
    "kills": kill_cases.kills,
    "all-die": kill_cases.all_die,
    "frozen": kill_cases.frozen,
    "power": power_cases.power,
    "steps": disk_cases.steps,
    "eio": disk_cases.eio,
    "clock": disk_cases.clock,
    **net_cases.CASES,
}
LEFT_OUT = {
    "loss": "was never run to its end",
}
"""Cases that `make chaos` names and does not run, with the reason; `--only` runs them."""


def main(arguments: Sequence[str]) -> int:
    """Run what was asked for; the exit code."""
    parser = argparse.ArgumentParser("python -m tests.chaos")
    parser.add_argument("--only", default=",".join(name for name in CASES if name not in LEFT_OUT))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--full", action="store_true")
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
    results = [played(name, given.seed, given.full) for name in names]
    counts = [sum(result.holds for result in results), sum(not result.is_run for result in results)]
    print(f"{counts[0]} of {len(results)} cases hold, {counts[1]} not run")
    return 0 if all(result.holds for result in results) else 1


def played(name: str, seed: int, full: bool) -> Result:
    """Play a case, print its lines, and return what came of it."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-") as folder:
        try:
            result = CASES[name](Path(folder), seed, full)
        except NotRun as reason:
            result = Result(name, seed, str(reason), is_run=False)
        except (AtollError, AssertionError) as error:
            result = Result(name, seed, "it came to no end", [str(error)])
    result.seen += f" ({time.monotonic() - began:.0f} s)"
    print("\n".join(result.lines(" --full" if full else "")), flush=True)
    return result


def judged(folder: Path) -> int:
    """Print the oracle's verdict over the homes in a folder; the exit code."""
    try:
        verdict = judge(read_homes(folder))
    except AtollError as error:
        print(error.line(), file=sys.stderr)
        return 2
    for violation in verdict.violations:
        print(violation)
    print(verdict.line)
    return 1 if verdict.violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
