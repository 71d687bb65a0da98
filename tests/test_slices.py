"""What `make test` leaves to `make slow` is stood for by tests that it runs; groups stay on one worker."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import MARKS
from tests.mutants.mutant import ROOT, exists, read_mutants

COLLECT = """
import json, sys, pytest

OPTIONS = ["--collect-only", "-q", "-m", "", "-n", "0", "--assert", "plain"]

class Found:
    def pytest_collection_finish(self, session):
        marks = [(item.nodeid, item.get_closest_marker("slow"), item.get_closest_marker("measure"))
                 for item in session.items]
        rows = [(name, slow and [slow.args, slow.kwargs], bool(measure)) for name, slow, measure in marks]
        print("found", json.dumps(rows))

sys.exit(pytest.main(OPTIONS + sys.argv[1:], plugins=[Found()]))
"""


class Case(NamedTuple):
    """A test as pytest names it. `slice`: None where `make test` runs it."""

    test: str
    slice: tuple[str, ...] | None
    is_measure: bool


def collected(files: list[str]) -> list[Case]:
    """All cases of `files`. Raises AssertionError for a mark that is not `slow(slice="…")`."""
    ran = subprocess.run([sys.executable, "-c", COLLECT, *files], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-2000:]
    (line,) = (line for line in ran.stdout.splitlines() if line.startswith("found "))
    return [case_of(*row) for row in json.loads(line.removeprefix("found "))]


def case_of(test: str, slow: tuple[list[str], dict[str, str]] | None, is_measure: bool) -> Case:
    if slow is None:
        return Case(test, None, is_measure)
    args, named = slow
    assert not args, test
    assert set(named) == {"slice"}, test
    file = test.partition("::")[0]
    # A name without a file is of the same file.
    names = tuple(name if "::" in name else f"{file}::{name}" for name in named["slice"].split(", "))
    return Case(test, names, is_measure)


@pytest.fixture(scope="module")
def cases(request) -> list[Case]:
    """All cases; where not all were collected, those of files with a slow case, and those of their slices."""
    config = request.config
    if [Path(name).resolve() for name in config.args] == [ROOT / "tests"]:
        marks = config.stash[MARKS].items()
        return [
            case_of(test, (list(slow.args), dict(slow.kwargs)) if slow else None, is_measure)
            for test, (slow, is_measure) in marks
        ]
    return cases_of_files()


@cache
def cases_of_files() -> list[Case]:
    """See `cases`."""
    tests = (ROOT / "tests").rglob("test_*.py")
    files = sorted(file.relative_to(ROOT).as_posix() for file in tests if "mark.slow(" in file.read_text())
    found = collected([file for file in files if file != "tests/test_slices.py"])
    others = {name.partition("::")[0] for case in found for name in case.slice or ()} - set(files)
    return [*found, *collected(sorted(others))]


@pytest.fixture(scope="module")
def here(cases) -> set[str]:
    """Tests of which `make test` runs a case, with the case and without."""
    ids = {case.test for case in cases if case.slice is None and not case.is_measure}
    return ids | {test.partition("[")[0] for test in ids}


def test_each_slow_case_is_stood_for_by_tests_that_run_here(cases, here):
    slow = [case for case in cases if case.slice is not None]
    assert len(slow) > 20
    assert [(case.test, name) for case in slow for name in case.slice or () if name not in here] == []


def test_no_mutant_needs_a_slow_case(cases, here):
    """pytest would leave it out, and the mutant would survive."""
    files = {case.test.partition("::")[0] for case in cases}
    named = {test for mutant in read_mutants() for test in mutant.tests if test.partition("::")[0] in files}
    assert named
    assert [test for test in named if exists(test) and test not in here] == []


def test_make_slow_runs_what_make_test_leaves_out():
    rules = (ROOT / "Makefile").read_text()
    assert "-m 'slow and not measure'\n" in rules
    assert "-m 'not measure and not slow'\"" in (ROOT / "pyproject.toml").read_text()


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="there is one process")
@pytest.mark.xdist_group("slices")
def test_a_group_has_its_name_in_the_ids_of_its_tests(request):
    """By that pytest-xdist keeps it on one worker: its fixtures are made once, and swarms run one at a time."""
    assert request.node.nodeid.endswith("@slices")


@pytest.fixture(scope="module")
def made_once() -> object:
    return object()


def test_a_module_with_fixtures_of_its_own_is_a_group(request, made_once):
    """Without, each worker would make them: a site, a wheel and a trained model up to three times."""
    (group,) = request.node.iter_markers("xdist_group")
    assert group.args == ("tests/test_slices.py",)
