"""Parts of a soak, and a slice of one: what happens to whom, what is read of a process, and what is said of it."""

import subprocess
import sys
from itertools import pairwise
from types import SimpleNamespace

import psutil
import pytest

from atoll.cli.sim.oracle import Verdict, Violation
from tests.chaos import soak
from tests.chaos.disk_cases import RUN, environment
from tests.chaos.growth import LEAST_S, Sample
from tests.chaos.soak import (
    FULL,
    SHORT,
    STRIKES,
    WARM_ROUNDS,
    Plan,
    Watch,
    acts,
    judged,
    kind_of,
    sample_of,
    soaked,
)
from tests.waiting import poll

CLEAN = Verdict([], 10, 10, 10, 0)
HELD = {"daemon": 80.0, "p2pd": 30.0, "worker": 300.0, "memory": 410.0, "descriptors": 60.0}
STAND_IN = """
import subprocess, sys
if sys.argv[1] == "atoll.cli.main":
    subprocess.Popen([sys.executable, "-c", sys.argv[2], "atoll.node.worker.main", ""])
    subprocess.Popen(["sleep", "600"])
    subprocess.Popen(["p2pd", "-c", "import time; time.sleep(600)"], executable=sys.executable)
    files = [open("/dev/null") for _ in range(50)]
held = bytearray(100_000_000) if "worker" in sys.argv[1] else b""
sys.stdin.read() if sys.argv[2] else __import__("time").sleep(600)
"""


def samples(seconds, **per_h):
    return [
        Sample(float(at), node, (node,), at // 5, {k: v + per_h.get(k, 0.0) * at / 3600 for k, v in HELD.items()})
        for node in FULL.watched
        for at in range(0, seconds, 5)
    ]


@pytest.mark.parametrize("plan", [SHORT, FULL])
def test_only_those_that_are_not_watched_are_struck_and_each_strike_ends_before_the_next(plan):
    todo = acts(plan, 1)
    assert todo == acts(plan, 1)
    assert len(plan.struck) == 1 or todo != acts(plan, 2)
    assert [act.at_s for act in todo] == sorted(act.at_s for act in todo)
    assert {act.node for act in todo} == set(plan.struck)
    assert {*plan.watched, *plan.struck, plan.liar} == set(range(plan.nodes))
    assert {act.what for act in todo if act.what in STRIKES} == set(STRIKES)
    for one, after in pairwise(todo):
        if one.what in ("freeze", "leave"):
            assert (after.node, after.what) == (one.node, "thaw" if one.what == "freeze" else "return")
            assert after.at_s < one.at_s + plan.every_s


def test_an_hour_without_growth_holds():
    result = judged(FULL, 1, samples(3600), 100, CLEAN)
    assert result.holds, result.lines()
    assert "0 violations" in result.seen


@pytest.mark.parametrize(("what", "per_h"), [("memory", 5.0), ("descriptors", 20.0)])
def test_a_leak_breaks_it_and_names_the_node(what, per_h):
    result = judged(FULL, 1, samples(3600, **{what: per_h}), 100, CLEAN)
    assert len(result.broken) == len(FULL.watched)
    assert result.broken[0].startswith(f"node 0: {what} grow +{per_h}")


def test_a_process_is_said_apart_from_the_others():
    assert "worker +1.0 ± 0.0 MB/h" in judged(FULL, 1, samples(3600, worker=1.0), 9, CLEAN).seen


@pytest.mark.parametrize("per_h", [0.0, 3000.0])
def test_minutes_show_nothing_and_say_so(per_h):
    result = judged(SHORT, 1, samples(180, memory=per_h), 9, CLEAN)
    assert not result.holds
    assert result.broken == []
    assert result.lines()[0].startswith("UNSURE   soak")
    assert "too short" in result.lines()[1]


def test_a_violation_or_a_liar_that_ended_breaks_it():
    left = CLEAN._replace(violations=[Violation("no forked final rounds", "round 3")])
    result = judged(FULL, 1, samples(3600), 100, left, ["the liar ended by itself"])
    assert result.broken == ["no forked final rounds: round 3", "the liar ended by itself"]


class Played(Watch):
    """Writes down when something is done to whom."""

    def _perform(self, act):
        self.done = [*getattr(self, "done", []), (soak.time.monotonic(), act.what, act.node)]


def watched(monkeypatch, folder, plan, round_s):
    """A watch of nodes whose rounds take that long, on virtual time: what was done, and the samples."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(soak, "time", clock)
    monkeypatch.setattr(soak, "sample_of", lambda node, now: Sample(now, node, (node,), int(now / round_s), HELD))
    watch = Played(SimpleNamespace(nodes=range(plan.nodes)), plan, folder / "samples.csv")
    return watch.run(acts(plan, 1)), watch.done


@pytest.mark.parametrize("round_s", [3.0, 12.0])
def test_the_time_that_is_measured_begins_when_the_tables_of_all_are_full(monkeypatch, tmp_path, round_s):
    seen, done = watched(monkeypatch, tmp_path, FULL, round_s)
    assert WARM_ROUNDS == 128
    assert seen[-1].at_s == pytest.approx(WARM_ROUNDS * round_s + FULL.seconds, abs=12)
    assert FULL.seconds > LEAST_S
    strikes = [what for _, what, _ in done if what in STRIKES]
    assert len(strikes) == int((seen[-1].at_s) / FULL.every_s)
    words = judged(FULL, 1, seen, 300, CLEAN).seen
    assert (
        f"{seen[-1].at_s / 60:.0f} min (50 measured, from round 128 of theirs on), {len(strikes)} strikes" in words
    )


def test_nodes_that_are_never_warm_give_no_figure_but_an_end(monkeypatch, tmp_path):
    seen, _ = watched(monkeypatch, tmp_path, FULL, 60.0)
    assert seen[-1].at_s == pytest.approx(FULL.warm_most_s, abs=6)
    assert judged(FULL, 1, seen, 60, CLEAN).undecided


def test_who_is_away_at_the_end_comes_back(monkeypatch, tmp_path):
    plan = Plan(nodes=4, seconds=20.0, every_s=15.0, warm_rounds=1)
    _, done = watched(monkeypatch, tmp_path, plan, 5.0)
    assert [what for _, what, _ in done] == ["freeze", "thaw"]
    assert done[1][0] > 20


def test_memory_and_descriptors_are_read_by_kind_of_process():
    command = [sys.executable, "-c", STAND_IN, "atoll.cli.main", STAND_IN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
        daemon = psutil.Process(process.pid)
        node = SimpleNamespace(
            number=3,
            processes=lambda: [daemon, *daemon.children(recursive=True)],
            status=lambda: {"final": 9},
        )
        try:
            found = poll("all run", lambda: (s := sample_of(node, 7.0)) and s.values["worker"] > 100 and s)
            kinds = [kind_of(child) for child in node.processes()]
        finally:
            for child in reversed(node.processes()):
                child.kill()
    assert sorted(kinds) == ["", "daemon", "p2pd", "worker"]
    assert (found.at_s, found.node, len(found.life), found.rounds) == (7.0, 3, 3, 9)
    assert 100 < found.values["worker"] < 150
    assert found.values["daemon"] < 60
    assert found.values["memory"] == pytest.approx(
        sum(found.values[kind] for kind in ("daemon", "p2pd", "worker"))
    )
    assert 59 <= found.values["descriptors"] <= 80


LIES = """
from atoll.node.learning.inner.loop import learning_rate
from atoll.p2p.ledger.store import Ledger
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round, RunId, digest
from atoll.protocols.ledger.records import Ack
from pathlib import Path
from types import SimpleNamespace
import sys
ledger = Ledger(Path(sys.argv[1]) / "ledger.sqlite", RunId(bytes(32)))
told = [ledger.append(Identity(bytes(32)), Ack(Round(n), digest(b"set"), digest(b"state"))) for n in range(60)]
inner = SimpleNamespace(first_step=0, warmup_steps=10, lr=0.5)
print(sum(entry.body.members != digest(b"set") for entry in told), learning_rate(inner, 9))
"""


@pytest.mark.parametrize(
    ("variables", "role"), [({}, ""), ({"CHAOS_LIES": "1"}, ""), ({"CHAOS_LIES": "1"}, "worker")]
)
def test_a_liar_lies(tmp_path, variables, role):
    script = tmp_path / "atoll_lies.py"
    script.write_text(LIES)
    command = [sys.executable, str(script), str(tmp_path)] + (["atoll.node.worker.main"] if role else [])
    with environment(variables):
        said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert said.returncode == 0, said.stderr
    lies, rate = said.stdout.split()
    assert (0 < int(lies) < 60) is (bool(variables) and not role)
    assert float(rate) == (-0.5 if role else 0.5)


@pytest.mark.slow(
    slice=("tests/chaos/test_chaos.py::test_a_power_loss_at_random_instants, test_minutes_show_nothing_and_say_so")
)
@pytest.mark.swarm
@pytest.mark.xdist_group("swarm")
def test_a_slice_of_a_soak(tmp_path):
    plan = Plan(nodes=3, seconds=12.0, every_s=3.0, warm_rounds=2, sample_s=1.0, changes=RUN)
    result = soaked(tmp_path, 7, plan)
    assert result.broken == [], "\n".join(result.lines())
    assert result.undecided, "it is too short to show anything"
    rows = [line.split(",") for line in (tmp_path / "samples.csv").read_text().splitlines()]
    assert {row[1] for row in rows} == {"0"}
    assert all(float(value) > 5 for row in rows for value in row[3:])
    assert int(rows[-1][2]) >= int(rows[0][2]) + 2
