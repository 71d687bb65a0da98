"""A pytest plugin that writes which test ended how, and refuses modules from outside the tree that is tested."""

import json
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

ROOT = Path(__file__).resolve().parents[2]
OURS = ("atoll", "atoll_bench", "atoll_lab", "tests")
# A failure is enough: looking for the smallest example takes minutes.
settings.register_profile("mutants", phases=(Phase.explicit, Phase.reuse, Phase.generate), print_blob=False)
_ended: dict[str, list[tuple[str, str, list[str]]]] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", required=True, help="the file for what each test ended with")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    report = yield
    errors = list(_errors(call.excinfo.value)) if call.excinfo else []
    _ended.setdefault(item.nodeid, []).append((report.when, report.outcome, errors))
    if report.failed:
        # At once: what a failed test left open may end the session before its last hook.
        _write(item.config)
    return report


def _errors(error: BaseException) -> Iterator[str]:
    """The class of `error`; those of its members if it is a group."""
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from _errors(member)
    else:
        yield type(error).__name__


def pytest_sessionfinish(session: pytest.Session) -> None:
    _write(session.config)


def _write(config: pytest.Config) -> None:
    found = {"ended": _ended, "outside": foreign_modules(ROOT)}
    Path(config.getoption("outcomes")).write_text(json.dumps(found))


def foreign_modules(root: Path) -> list[str]:
    """Names of our loaded modules whose file is not below `root`."""
    return [
        name
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in OURS
        and (file := getattr(module, "__file__", None))
        and not Path(file).is_relative_to(root)
    ]
