"""Mutants: one small file for each way to break a promise, and what is wrong with such a file."""

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent
NEEDED = {"promise": str, "why": str, "file": str, "find": str, "replace": str, "tests": list}
OPTIONAL = {"sample": bool}
MAY_BE_EMPTY = ("replace", "sample")


class MutantError(Exception):
    """One line about a mutant that cannot be used or was not caught."""


@dataclass(frozen=True)
class Mutant:
    """A break of one promise: `find` becomes `replace` in `file`, and each of `tests` must then fail."""

    name: str
    promise: str
    why: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]
    sample: bool = False


def read_mutants(folder: Path = FOLDER) -> list[Mutant]:
    """Every mutant in `folder`, by name. Raises MutantError for a file that lacks a field or has another one."""
    return [_read(path) for path in sorted(folder.glob("*.toml"))]


def _read(path: Path) -> Mutant:
    try:
        fields = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise MutantError(f"{path.stem}: {error}") from error
    if missing := sorted(NEEDED.keys() - fields.keys()):
        raise MutantError(f"{path.stem}: lacks {', '.join(missing)}")
    for key, value in fields.items():
        wanted = {**NEEDED, **OPTIONAL}.get(key)
        if wanted is None or not isinstance(value, wanted) or (not value and key not in MAY_BE_EMPTY):
            raise MutantError(f"{path.stem}: {key} is unknown, empty or of another type")
    return Mutant(**{**fields, "name": path.stem, "tests": tuple(fields["tests"])})


def problems(mutant: Mutant, root: Path = ROOT) -> Iterator[str]:
    """A line for each thing that keeps `mutant` from being applied to the tree at `root`."""
    path = root / mutant.file
    found = path.read_text().count(mutant.find) if path.is_file() else 0
    if found != 1:
        yield f"{mutant.name}: its text occurs {found} times in {mutant.file}, not once"
    if mutant.find == mutant.replace:
        yield f"{mutant.name}: replaces its text with the same"
    for test in mutant.tests:
        if not exists(test, root):
            yield f"{mutant.name}: there is no test {test}"


def exists(test: str, root: Path = ROOT) -> bool:
    """Whether `test`, as pytest names it, is in its file."""
    file, *names = test.partition("[")[0].split("::")
    path = root / file
    if not names or not path.is_file():
        return False
    scope = _statements(path.read_text())
    for name in names:
        defined = [statement for statement in scope if name in _names(statement)]
        if not defined:
            return False
        scope = getattr(defined[-1], "body", [])
    return True


@cache
def _statements(text: str) -> list[ast.stmt]:
    # Many mutants name tests of one file.
    return ast.parse(text).body


def _names(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Assign):
        # A state machine of hypothesis is a test by assignment: TestLedger = Machine.TestCase.
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    return [getattr(statement, "name", "")]
