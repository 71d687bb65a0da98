"""Break each promise on purpose, and see its tests fail.

    python -m tests.mutants [NAME ...] [--sample] [--limit SECONDS]

In a temporary copy of the tree: the named tests must pass as the tree is, and each must fail with the mutant in
place. A line is printed for each mutant; the exit status is 1 if one was not killed.
"""

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence, Set
from functools import partial

from tests.mutants.mutant import ROOT, Mutant, MutantError, problems, read_mutants
from tests.mutants.tree_copy import Outcome, TreeCopy, copy_of

LIMIT_S = 60.0
UNBROKEN_LIMIT_S = 600.0
NO_EVIDENCE = {"NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError", "SyntaxError"}
"""Errors of a program that cannot run at all: any test would end with them."""


def why_not_passed(outcome: Outcome, test: str) -> str | None:
    """What is wrong with `test` in the tree as it is; None if every case of it passed."""
    cases = outcome.of(test)
    if not cases:
        return f"{test} did not run (pytest ended with {outcome.status}: {outcome.tail})"
    for phase, result, errors in (report for reports in cases for report in reports):
        if result != "passed":
            return f"{test} has {result} without the mutant ({phase}: {', '.join(errors)})"
    return None


def why_not_killed(outcome: Outcome, tests: Sequence[str]) -> str | None:
    """What keeps a run with the mutant from showing that each of `tests` saw it; None if each did."""
    if outcome.status not in (0, 1):
        return f"its tests did not run: pytest ended with {outcome.status}: {outcome.tail}"
    for test in tests:
        reports = [report for case in outcome.of(test) for report in case]
        failures = [errors for phase, result, errors in reports if phase == "call" and result == "failed"]
        if not failures:
            return f"survives {test}"
        if all(NO_EVIDENCE.intersection(errors) for errors in failures):
            return f"is not a program: {test} ends with {failures[0]}"
    return None


def unbroken(tree: TreeCopy, mutants: Sequence[Mutant]) -> dict[str, str]:
    """For each test that does not pass in the tree as it is, why.

    All tests run once, together: an interpreter and its imports cost more than most of them. What then did not
    pass, or was not reached because the run ended, runs once more with the tests of its file only.
    """
    tests = {test for mutant in mutants for test in mutant.tests}
    wrong = _not_passed(tree, tests)
    files: dict[str, set[str]] = {}
    for test in wrong:
        files.setdefault(test.partition("::")[0], set()).add(test)
    again = [_not_passed(tree, each) for each in files.values()]
    return {test: why for found in again for test, why in found.items()}


def _not_passed(tree: TreeCopy, tests: Set[str]) -> dict[str, str]:
    try:
        outcome = tree.run(sorted(tests), UNBROKEN_LIMIT_S)
    except MutantError as error:
        return dict.fromkeys(tests, str(error))
    return {test: why for test in tests if (why := why_not_passed(outcome, test))}


def judge(tree: TreeCopy, mutant: Mutant, wrong: dict[str, str], limit_s: float) -> None:
    """Raises MutantError unless every test of `mutant` passes without it and fails with it, within `limit_s`."""
    if failing := [wrong[test] for test in mutant.tests if test in wrong]:
        raise MutantError("; ".join(failing))
    with tree.broken(mutant):
        outcome = tree.run(mutant.tests, limit_s)
    if why := why_not_killed(outcome, mutant.tests):
        raise MutantError(why)


def run(mutants: Sequence[Mutant], limit_s: float, report: Callable[[str], None]) -> int:
    """Judge each mutant; returns how many were not killed. `report` receives a line for each."""
    wrong_files = {mutant.name: list(problems(mutant)) for mutant in mutants}
    for line in (line for lines in wrong_files.values() for line in lines):
        report(f"FAIL {line}")
    usable = [mutant for mutant in mutants if not wrong_files[mutant.name]]
    failed = len(mutants) - len(usable)
    with copy_of(ROOT) as tree:
        wrong = unbroken(tree, usable)
        for mutant in usable:
            begun = time.monotonic()
            try:
                judge(tree, mutant, wrong, limit_s)
                report(f"killed {time.monotonic() - begun:5.1f} s  {mutant.name}")
            except MutantError as error:
                failed += 1
                report(f"FAIL {mutant.name}: {error}")
    return failed


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        "python -m tests.mutants", description="Break promises; their tests must fail."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="of files in tests/mutants, without .toml")
    parser.add_argument("--sample", action="store_true", help="only those that `make test` runs")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for the tests of one mutant")
    options = parser.parse_args()
    # A run that is ended leaves neither its copy nor the processes of its tests.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    begun = time.monotonic()
    try:
        mutants = read_mutants()
        if unknown := set(options.names) - {mutant.name for mutant in mutants}:
            raise MutantError(f"there is no mutant {', '.join(sorted(unknown))}")
        chosen = [
            m
            for m in mutants
            if (not options.names or m.name in options.names) and (m.sample or not options.sample)
        ]
        failed = run(chosen, options.limit, partial(print, flush=True))
    except MutantError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(chosen)} mutants, {failed} not killed, {time.monotonic() - begun:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
