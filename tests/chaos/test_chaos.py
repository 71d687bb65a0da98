"""A slice of `make chaos`: power losses of a real node, and what the program says and returns."""

import pytest

from atoll.protocols.errors import LocalFault
from tests.chaos import __main__ as chaos
from tests.chaos import power_cases
from tests.chaos.report import NotRun, Result
from tests.cli.sim.test_oracle import homes, own_digest, sound  # noqa: F401

pytestmark = [pytest.mark.xdist_group("swarm")]


@pytest.mark.swarm
def test_a_power_loss_at_random_instants(tmp_path, monkeypatch):
    """Fails, and never skips, where loop mounts cannot be had."""
    monkeypatch.setattr(power_cases, "SNAPSHOTS", 3)
    result = chaos.outcome(power_cases.power, "power", tmp_path, 7)
    assert result.broken == [], "\n".join(result.lines())
    assert result.is_run


def test_a_broken_case_says_how_it_is_played_again():
    result = Result("power", 7, "5 snapshots", ["snapshot 3: a blob is not whole"])
    assert result.lines(" --full") == [
        "BROKEN   power        seed 7: 5 snapshots",
        "  snapshot 3: a blob is not whole",
        "  again: python -m tests.chaos --only power --seed 7 --full",
    ]
    assert Result("power", 7, "5 snapshots").lines() == ["ok       power        seed 7: 5 snapshots"]


def fails(error):
    def case(folder, seed, full):
        raise error

    return case


@pytest.mark.parametrize(
    ("case", "code", "said"),
    [
        (lambda folder, seed, full: Result("power", seed, "fine"), 0, "ok "),
        (lambda folder, seed, full: Result("power", seed, "bad", ["round 3"]), 1, "  round 3"),
        (fails(LocalFault("node 1 ended")), 1, "node 1 ended"),
        (fails(NotRun("no loop mounts")), 1, "NOT RUN"),
    ],
)
def test_the_exit_code_is_the_verdict(case, code, said, monkeypatch, capsys):
    monkeypatch.setitem(chaos.CASES, "power", case)
    assert chaos.main(["--only", "power"]) == code
    assert said in capsys.readouterr().out


LOG = """the node is up
Traceback (most recent call last):
  File "driver.py", line 3, in run
    raise ValueError
ValueError: round 3
Traceback (most recent call last):
  File "driver.py", line 3, in run
ValueError: round 3
"""
JSON_LOG = r'{"level": "error", "message": "failed\nTraceback (most recent call last):\n  File\nKeyError: 3"}'


def leaves_tracebacks(folder, seed, full):
    run = folder / "homes" / "node-1" / "runs" / "abc"
    run.mkdir(parents=True)
    (run.parents[1] / "out.log").write_text(LOG)
    (run.parents[1] / "node.log.1").write_text(JSON_LOG)
    (run / "worker.log").write_text("Fatal Python error: Aborted\n\nCurrent thread\n")
    (run / "notes.txt").write_text(LOG)
    return Result("power", seed, "fine")


def test_a_traceback_in_a_log_of_any_node_breaks_a_case(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(chaos.CASES, "power", leaves_tracebacks)
    assert chaos.main(["--only", "power", "--keep", str(tmp_path / "kept")]) == 1
    assert [line.strip() for line in capsys.readouterr().out.splitlines()[1:4]] == [
        'homes/node-1/node.log.1: a traceback, KeyError: 3"}',
        "homes/node-1/out.log: a traceback, ValueError: round 3",
        "homes/node-1/runs/abc/worker.log: Fatal Python error: Aborted",
    ]


def test_a_case_that_came_to_no_end_tells_the_tracebacks_too(tmp_path):
    def case(folder, seed, full):
        leaves_tracebacks(folder, seed, full)
        raise LocalFault("node 1 ended")

    assert len(chaos.outcome(case, "power", tmp_path, 1).broken) == 4


def test_homes_can_be_judged_by_themselves(homes, tmp_path, capsys):  # noqa: F811
    assert chaos.main(["--judge", str(homes)]) == 0
    own_digest(homes)
    assert chaos.main(["--judge", str(homes)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[1].startswith("a worker computes the certified digest: round 1 of node-1: bb, certified ")
    (tmp_path / "empty").mkdir()
    assert chaos.main(["--judge", str(tmp_path / "empty")]) == 2


def test_what_is_left_out_is_said(monkeypatch, capsys):
    for name in chaos.CASES:
        monkeypatch.setitem(chaos.CASES, name, lambda folder, seed, full, name=name: Result(name, seed, "fine"))
    assert chaos.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines if line.startswith("LEFT OUT")] == list(chaos.LEFT_OUT)
    assert {
        line.split()[1] for line in lines if line.startswith("ok")
    } == chaos.CASES.keys() - chaos.LEFT_OUT.keys()
    assert chaos.main(["--only", "one-way"]) == 0
    assert "LEFT OUT" not in capsys.readouterr().out
