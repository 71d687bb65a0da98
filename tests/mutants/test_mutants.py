"""The mutant list is long enough, its sample is killed, and the harness takes nothing else for a kill."""

from collections import Counter
from dataclasses import replace

import pytest

from tests.mutants.__main__ import run, why_not_killed, why_not_passed
from tests.mutants.mutant import ROOT, Mutant, MutantError, problems, read_mutants
from tests.mutants.tree_copy import Outcome, TreeCopy

LEAST = 120
SAMPLE_LIMIT_S = 300.0
"""For the tests of one mutant beside other work; `make mutants` allows 60 s."""
TEST = "tests/protocols/test_codec.py::test_one"
PASSED = [("setup", "passed", []), ("call", "passed", []), ("teardown", "passed", [])]
BROKEN = Mutant("broken", "P1: a sentence.", "A reason.", "a.py", "x = 1", "x = 2", ("test_a.py::test_x",))


def ended(*errors: str, phase: str = "call", status: int = 1) -> Outcome:
    """A run in which a case of TEST failed with `errors`."""
    return Outcome(status, {f"{TEST}[1]": PASSED, f"{TEST}[2]": [(phase, "failed", list(errors))]}, "the end")


def test_there_are_enough():
    assert len(read_mutants()) >= LEAST


def test_every_promise_and_every_wire_has_some():
    wires = [page.stem for page in (ROOT / "docs" / "wires").glob("*.md")]
    wanted = [*(f"P{number}" for number in range(1, 10)), *(f"Wire {name}" for name in wires), "Limit"]
    found = Counter(mutant.promise.partition(":")[0] for mutant in read_mutants())
    assert [name for name in wanted if found[name] < 2] == []


@pytest.mark.timeout(900)
def test_a_sample_is_killed():
    lines: list[str] = []
    failed = run([mutant for mutant in read_mutants() if mutant.sample], SAMPLE_LIMIT_S, lines.append)
    assert failed == 0, "\n".join(lines)


def test_a_failed_assertion_kills():
    assert why_not_killed(ended("AssertionError"), [TEST]) is None


@pytest.mark.parametrize("status", [2, 3, 4, 5])
def test_a_run_that_did_not_come_to_its_tests_kills_nothing(status):
    assert "did not run" in (why_not_killed(ended("AssertionError", status=status), [TEST]) or "")


@pytest.mark.parametrize("error", ["NameError", "ImportError", "SyntaxError"])
def test_a_program_that_cannot_run_kills_nothing(error):
    assert "not a program" in (why_not_killed(ended(error), [TEST]) or "")


def test_a_broken_fixture_kills_nothing():
    assert "survives" in (why_not_killed(ended("AssertionError", phase="setup"), [TEST]) or "")


def test_every_named_test_must_fail():
    assert why_not_killed(ended("AssertionError"), [TEST, TEST + "_more"]) == f"survives {TEST}_more"


def test_a_skipped_test_has_not_passed():
    skipped = Outcome(0, {TEST: [("setup", "skipped", ["Skipped"])]}, "")
    assert why_not_passed(Outcome(0, {TEST: PASSED}, ""), TEST) is None
    assert "skipped" in (why_not_passed(skipped, TEST) or "")
    assert "did not run" in (why_not_passed(skipped, TEST + "_more") or "")


def test_a_mutant_that_does_not_apply_is_named(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "test_a.py").write_text("class TestAll:\n    def test_x(self): ...\ntest_x = TestAll\n")
    assert list(problems(BROKEN, tmp_path)) == []
    assert list(problems(replace(BROKEN, tests=("test_a.py::TestAll::test_x[1]",)), tmp_path)) == []
    for wrong in (
        replace(BROKEN, find="x = 3"),
        replace(BROKEN, find="", replace="y"),
        replace(BROKEN, replace="x = 1"),
        replace(BROKEN, file="b.py"),
        replace(BROKEN, tests=("test_a.py",)),
        replace(BROKEN, tests=("test_a.py::test_y",)),
        replace(BROKEN, tests=("test_a.py::TestAll::test_y",)),
    ):
        assert len(list(problems(wrong, tmp_path))) == 1


def test_the_tree_is_restored(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("x = 1\n")
    before = file.stat().st_mtime_ns
    with TreeCopy(tmp_path).broken(replace(BROKEN, file="notes.txt")):
        assert file.read_text() == "x = 2\n"
    assert (file.read_text(), file.stat().st_mtime_ns) == ("x = 1\n", before)


@pytest.mark.parametrize("line", ["promise = 1", "more = 'x'", "tests = []", "tests = ["])
def test_a_file_of_another_form_is_refused(tmp_path, line):
    fields = ("promise", "why", "file", "find", "replace")
    lines = [*(f"{field} = 'x'" for field in fields), "tests = ['x']"]
    (tmp_path / "one.toml").write_text("\n".join(lines))
    assert len(read_mutants(tmp_path)) == 1
    kept = [other for other in lines if other.split()[0] != line.split()[0]]
    (tmp_path / "one.toml").write_text("\n".join([*kept, line]))
    with pytest.raises(MutantError, match="one"):
        read_mutants(tmp_path)


def test_a_mutant_may_remove_its_text(tmp_path):
    fields = ("promise", "why", "file", "find")
    (tmp_path / "one.toml").write_text(
        "\n".join([*(f"{f} = 'x'" for f in fields), "replace = ''", "tests = ['x']"])
    )
    assert read_mutants(tmp_path)[0].replace == ""
