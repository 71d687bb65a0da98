"""Real nodes that train a package's model of pictures; a node without the package is told what it lacks."""

import json
from pathlib import Path

import pytest

from tests.e2e.late_join import kill_and_join
from tests.e2e.test_given_start import one_digest
from tests.node.learning.plugged.lane_package import write_lanes

pytestmark = pytest.mark.swarm


def test_a_run_of_the_package_is_made_and_shown_and_a_node_without_it_is_told_so(
    node, monkeypatch, tmp_path: Path
):
    node.atoll("run", "new", "tiny", "--model", "lanes.1").refused(78, "needs the model lanes.1, which is not")
    monkeypatch.setenv("PYTHONPATH", str(write_lanes(tmp_path / "site")))
    node.atoll("run", "new", "tiny", "--model", "lanes.1", "--data", "synthetic:markov").refused(
        78, "--model brings its model and examples"
    )
    node.new_run("--model", "lanes.1", "--set", "pace.min_members=2")
    shown = node.atoll("run", "show", "tiny")
    assert "29,617 parameters of lanes.1, by the package atoll-lanes that is installed here" in shown.out
    monkeypatch.delenv("PYTHONPATH")
    node.start_refused("--run", "tiny").refused(78, "needs the model lanes.1, which is not installed here")


@pytest.mark.slow(
    slice=(
        "test_a_run_of_the_package_is_made_and_shown_and_a_node_without_it_is_told_so, "
        "tests/node/worker/test_plugged.py::test_members_learn_the_lanes_and_have_one_state, "
        "tests/node/worker/test_plugged.py::test_rules_and_codecs_know_the_arena_alone"
    )
)
def test_members_train_a_unet_over_the_same_rounds_and_a_node_without_it_is_told_so(
    nodes, until, monkeypatch, tmp_path: Path
):
    owner, second, late, other = (nodes(name) for name in ("owner", "second", "late", "other"))
    monkeypatch.setenv("PYTHONPATH", str(write_lanes(tmp_path / "site")))
    run = owner.new_run("--model", "lanes.1", "--set", "pace.min_members=2")
    owner.start("--run", "tiny").up()
    join = ("--run", str(run), "--seed", owner.seed())
    second.start(*join).up()
    until("rounds of both are final", lambda: min(owner.final(), second.final()) >= 1)
    kill_and_join(until, owner, second, late, join)
    assert len(one_digest(owner, second, late)) >= 3
    monkeypatch.delenv("PYTHONPATH")
    for roles in ((), ("--role", "seed")):
        other.start_refused(*join, *roles).refused(78, "needs the model lanes.1, which is not installed here")
    for node in (late, second, owner):
        node.stop()
    evaluated = owner.atoll("model", "export", "hf", str(tmp_path / "out"))
    evaluated.refused(78, "trains lanes.1 of the package atoll-lanes, no language model")
    owner.atoll("model", "generate", "x").refused(78, "no language model")
    saved = owner.atoll("checkpoint", "save", str(tmp_path / "saved"), "--json")
    assert json.loads(saved.out)["shard"]["round"] >= 1
