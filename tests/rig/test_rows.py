"""The rows of the rig are what was measured: nothing that did not happen is a pass. No lab is needed."""

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from atoll_lab import node as lab_node
from tests.rig import cases, node_cases, upnp_cases
from tests.rig.node_cases import Town, after
from tests.rig.punch_cases import Attempts, judged
from tests.rig.tables import Row


class FakeNode:
    """What `LabNode` tells a case: a round ends at every status; the pair is as `broken` says."""

    def __init__(self, peer: str, town: "FakeTown") -> None:
        self.peer, self._town = peer, town

    def status(self) -> dict[str, Any]:
        self._town.newest += 1
        return {"round": self._town.newest, "final": self._town.newest - 3}

    def answered(self) -> dict[str, Any]:
        return {"round": self._town.newest, "final": self._town.newest - 3}

    def rounds(self) -> list[dict[str, Any]]:
        """With overlap a round is open while two newer ones are trained; those are not final."""
        last = self._town.newest
        return [
            {
                "round": n,
                "final": n <= last - 3,
                "contributors": ["p3"] if n in self._town.without else ["p1", "p3"],
            }
            for n in range(last + 1)
        ]


class FakeTown(Town):
    """A town without a lab."""

    def __init__(self, without: set[int], broken: list[bool]) -> None:
        self.newest = 10
        self.without = without
        self._broken = iter(broken)
        self.nodes = {name: FakeNode(peer, self) for name, peer in (("home1", "p1"), ("home3", "p3"))}

    def works(self, a: str, b: str) -> bool:
        return not next(self._broken, False)


@pytest.fixture
def now(monkeypatch) -> Callable[[], float]:
    """A clock that every look and every pause moves."""
    clock = [0.0]

    def look() -> float:
        clock[0] += 0.1
        return clock[0]

    for module in (node_cases, lab_node):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=look, sleep=lambda _: None))
    return look


def recovered(now: Callable[[], float], without: set[int], broken: list[bool]) -> Row:
    return after(FakeTown(without, broken), ("home1", "home3"), lambda: None).row("address change")


@pytest.mark.parametrize("broken", [[False, True, True], []], ids=["broke", "did not break"])
def test_the_round_that_was_hit_counts(now, broken):
    """Rounds 8, 9 and 10 are open when the router is hit: 7 is the newest final one."""
    assert recovered(now, set(), broken).holds
    assert recovered(now, {6, 7}, broken).holds, "they were final before"
    for number in (8, 9, 10, 11):
        row = recovered(now, {number}, broken)
        assert not row.holds, number
        assert "1 of " in row.measured
    assert ("did not break" in row.measured) == (broken == [])


def test_a_pair_that_is_slow_to_recover_misses_the_bar(now):
    assert not recovered(now, set(), [True] * 200).holds
    assert recovered(now, set(), [True] * 20).holds


def test_pairs_that_never_connected_are_a_miss_and_no_traceback():
    none = Attempts(3, [], Counter(), ["not within 30 s"])
    assert not judged("homes", "", "punched", none).holds
    assert not judged("homes", "", "relayed", none).holds
    assert "not within 30 s" in judged("homes", "", "punched", none).measured


@pytest.mark.parametrize(("good", "holds"), [(95, True), (94, False)])
def test_a_share_of_the_pairs_must_be_punched(good, holds):
    paths = Counter({"punched/punched": good, "relayed/relayed": 100 - good})
    row = judged("homes", "", "punched", Attempts(100, [0.3] * 100, paths, []))
    assert row.holds == holds
    assert f"{good} of 100" in row.measured
    assert not judged("homes", "", "relayed", Attempts(100, [0.3] * 100, paths, [])).holds


def test_slow_pairs_are_a_miss():
    paths = Counter({"relayed/relayed": 2})
    assert judged("homes", "", "relayed", Attempts(2, [1.9, 9.9], paths, [])).holds
    assert not judged("homes", "", "relayed", Attempts(2, [1.9, 10.1], paths, [])).holds


def test_a_case_that_was_not_run_is_no_pass(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(upnp_cases, "shutil", SimpleNamespace(which=lambda _: None))
    (row,) = upnp_cases.mapped(tmp_path)
    assert row.holds is None
    assert str(row).startswith("NOT RUN")
    monkeypatch.setattr(cases, "missing", lambda: None)
    assert cases.main(["--only", "upnp"]) == 0
    assert "0 pass, 0 miss, 1 not run" in capsys.readouterr().out


@pytest.mark.parametrize(("holds", "status"), [(True, 0), (False, 1), (None, 0)])
def test_a_miss_is_the_exit_status(monkeypatch, holds, status):
    monkeypatch.setattr(cases, "missing", lambda: None)
    monkeypatch.setattr(cases, "groups", lambda attempts: {"punch": lambda folder: [Row("homes", "", "", holds)]})
    assert cases.main(["--only", "punch"]) == status


def test_a_traceback_in_a_log_of_a_case_is_a_miss(monkeypatch, capsys):
    def case(folder):
        (folder / "home1.log").write_text("Traceback (most recent call last):\n  File\nKeyError: 'peer'\n")
        return [Row("homes", "", "", holds=True)]

    monkeypatch.setattr(cases, "missing", lambda: None)
    monkeypatch.setattr(cases, "groups", lambda attempts: {"punch": case})
    assert cases.main(["--only", "punch"]) == 1
    assert "home1.log: a traceback, KeyError: 'peer'" in capsys.readouterr().out
