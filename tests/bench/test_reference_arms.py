"""The judgement of a swarm against its reference arms: it must be able to say no."""

import sys
import time
from types import SimpleNamespace

import pytest

from atoll.cli.sim.progress import Progress
from atoll.protocols.errors import LocalFault
from atoll_bench.reference_arms import reference
from atoll_bench.reference_arms.reference import ARMS, against, bpb_at, judge, learned, members_of_rounds, run_arms

UNIGRAM = {"unigram_bpb": 4.8}


def curve(*bpbs: float) -> dict[str, object]:
    return {"points": [{"tokens": 100 * (at + 1), "val_bpb": bpb} for at, bpb in enumerate(bpbs)]}


def test_limits_of_learning():
    assert learned(3.0, 4.8).ok
    assert not learned(4.0, 4.8).ok
    assert against({"adamw": 1.0}, 1.09, 1.10).ok
    assert not against({"adamw": 1.0}, 1.11, 1.10).ok


@pytest.mark.parametrize(("diloco", "average"), [(3.0, 3.3), (3.3, 3.0)])
def test_the_better_dense_arm_counts(diloco, average):
    arms = {"unigram": UNIGRAM, "adamw": curve(3.0), "diloco": curve(diloco), "average": curve(average)}
    assert [check.ok for check in judge(3.02, 100, arms)] == [True, True, True]
    *others, dense = judge(3.1, 100, arms)
    assert [check.ok for check in others] == [True, True]
    assert not dense.ok
    assert ("diloco is worse: 3.300" in dense.seen) == (diloco > average)


def test_a_swarm_that_validated_nothing_has_not_learned():
    arms = {"unigram": UNIGRAM, "adamw": curve(3.0), "diloco": curve(3.0), "average": curve(3.0)}
    assert [check.ok for check in judge(None, 0, arms)] == [False]


def test_arms_are_met_at_the_tokens_that_final_sets_used():
    points = curve(4.0, 3.0, 2.5)["points"]
    met = {tokens: bpb_at(points, tokens) for tokens in (0, 100, 160, 200, 250, 300, 999)}
    assert met == {0: 4.0, 100: 4.0, 160: 3.4, 200: 3.0, 250: 2.75, 300: 2.5, 999: 2.5}
    arms = {"unigram": UNIGRAM, "adamw": curve(4.0, 3.0), "diloco": curve(4.0, 3.0), "average": curve(4.0, 3.0)}
    assert [judge(bpb, 160, arms)[-1].ok for bpb in (3.43, 3.44)] == [True, False]


def test_the_arms_have_as_many_members_as_each_final_set():
    def row(number: int, *contributors: str, final: bool = True) -> dict[str, object]:
        return {"round": number, "final": final, "contributors": list(contributors)}

    rows = {
        0: [row(0, "p", "q"), row(1, "p"), row(2, "p", final=False)],
        1: [row(0, "p", "q"), row(3, "p", "q", "r")],
    }
    assert members_of_rounds(rows, 4) == [2, 1, 1, 3]


@pytest.fixture
def swarm(tmp_path) -> SimpleNamespace:
    spec = SimpleNamespace(id=bytes(32), outer=SimpleNamespace(rounds=2))
    return SimpleNamespace(
        folder=tmp_path,
        run_file=tmp_path / "run",
        spec=spec,
        nodes={0: SimpleNamespace(home=tmp_path)},
        sleep=time.sleep,
    )


def fake_arm(monkeypatch, tmp_path, program: str) -> None:
    """Run `program` instead of each arm, with the arm's arguments."""
    path = tmp_path / "arm.py"
    path.write_text(program)
    start = reference.subprocess.Popen
    monkeypatch.setattr(
        reference.subprocess, "Popen", lambda words, **more: start([sys.executable, path, *words[3:]], **more)
    )


def test_all_arms_run_with_the_members_of_each_round(swarm, tmp_path, monkeypatch):
    program = """
import json, sys
name, run, blobs, members, rounds, out = sys.argv[1:]
print("1/2", flush=True)
open(out, "w").write(json.dumps([name, members, rounds]))
"""
    fake_arm(monkeypatch, tmp_path, program)
    with (tmp_path / "progress").open("w") as out:
        found = run_arms(swarm, [4, 3], Progress(out))
    assert found == {name: [name, "4,3", "2"] for name in ARMS}
    assert {"diloco", "average"} < set(found)


def test_an_arm_that_fails_ends_the_others(swarm, tmp_path, monkeypatch):
    program = "import sys, time; sys.exit(1) if sys.argv[1] == 'unigram' else time.sleep(600)"
    fake_arm(monkeypatch, tmp_path, program)
    with (tmp_path / "progress").open("w") as out, pytest.raises(LocalFault, match="arm unigram failed"):
        run_arms(swarm, [4, 3], Progress(out))
