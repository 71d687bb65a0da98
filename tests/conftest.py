"""The long tests first: what starts whole swarms comes before the rest. No example of a law has a deadline.

The workers of `make test` take one test or group after the other. With the long ones first, thousands of short
ones are left to fill the end of each worker; with the long ones last, one worker would be idle for minutes.

The tests of a module with fixtures of its own (a site, a wheel, a trained model) run on one worker, else each
worker would make them.

Of long suites `make test` runs a slice: what is marked `slow` is left out, and a line at the end says what.
"""

import gc
import os
import signal
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Before torch is loaded, and for the processes that tests start: threads that wait for others' parts of a small
# array spin, and all take twice the time of one, more on a busy machine. Who needs more asks torch for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("atoll", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("atoll")

# Until all tests are collected: a quarter of the time that takes went into looks at what stays anyway.
gc.disable()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell without job control starts `make test &` like that, and every node of a test would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


left_out: Counter[str] = Counter()
"""Slow cases that are not run, by file; with pytest-xdist as its workers tell."""


MARKS = pytest.StashKey[dict[str, tuple[pytest.Mark | None, bool]]]()
"""Of each collected test, by id, also of those that are not run: its mark `slow`, and whether it is a measure."""


# First, because a worker of pytest-xdist writes the groups that it finds into the ids.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[MARKS] = {
        item.nodeid: (item.get_closest_marker("slow"), item.get_closest_marker("measure") is not None)
        for item in items
    }
    for item in items:
        if shares_fixtures(item) and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    # Groups run on one worker, whole; pytest-xdist hands out in this order.
    long = ("swarm", "xdist_group")
    items.sort(key=lambda item: not any(item.get_closest_marker(mark) for mark in long))
    if "not slow" in config.option.markexpr and not config.option.keyword:
        slow = (item for item in items if item.get_closest_marker("slow"))
        left_out.update(item.nodeid.partition("::")[0] for item in slow)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Let the collector pass over what was collected: with all tests, a look at it takes as long as many of them.

    Some tests and what they test collect by themselves, and the collector does so after many new objects.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def shares_fixtures(item: pytest.Item) -> bool:
    """Whether a test needs a fixture that is made once for all tests of its module."""
    known = getattr(item, "_fixtureinfo", None)
    found = known.name2fixturedefs.values() if known is not None else ()
    return any(each.scope == "module" for fixtures in found for each in fixtures)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """That of `--dist loadgroup`, which forgets what is done.

    It counts what a worker has left after each test, in all groups that it ever had: 4 s of CPU for 10,000 tests.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class Forgetful(LoadGroupScheduling):
        def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
            scope = self._split_scope(self.registered_collections[node][item_index])
            super().mark_test_complete(node, item_index, duration)
            if all(self.assigned_work[node][scope].values()):
                del self.assigned_work[node][scope]

    return Forgetful(config, log)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["left_out"] = dict(left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    # All workers collect the same; one that died tells nothing.
    told = getattr(node, "workeroutput", {}).get("left_out", {})
    left_out.update({file: count for file, count in told.items() if file not in left_out})


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if left_out:
        files = ", ".join(f"{file.removeprefix('tests/')} {count}" for file, count in sorted(left_out.items()))
        terminalreporter.write_line(
            f"SLICES ONLY: {left_out.total()} cases of {len(left_out)} files run in `make slow`: {files}"
        )
