"""A run that strangers may join, with real workers: noise falls and never decides, and the owner may vanish."""

import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import stop_all

pytestmark = pytest.mark.swarm

NOISE = Path(__file__).parent / "noise_worker"


@pytest.mark.slow(
    slice="tests/node/virtual/test_virtual_shown_work.py::"
    "test_noise_in_twenty_final_sets_decides_only_where_voters_need_not_show_work, "
    "tests/node/runs/test_guard.py::test_audits_take_half_as_long_as_the_steps_where_few_windows_show_enough, "
    "tests/node/daemon/test_member_standing.py::test_in_a_guarded_run_weight_and_vote_have_words_of_their_own"
)
def test_noise_falls_and_the_run_goes_on_without_its_owner(nodes, until):
    owner, one, two, liar = (nodes(name) for name in ("owner", "one", "two", "liar"))
    liar.environment = {"PYTHONPATH": str(NOISE)}
    owner.new_run(
        "--data", "synthetic:markov", "--admission", "open", "--puzzle", "8", "--set", "outer.stages=[[0,8]]",
        "--set", "inner.batch=8", "--set", "pace.min_members=4", "--set", "pace.lease_s=20",
    )  # fmt: skip
    owner.start("--run", "tiny").up()
    for node in (one, two, liar):
        node.start("--run", str(owner.home.run_file("tiny")), "--seed", owner.seed()).up()
    until("noise has no weight", lambda: standing(liar)["weight_16"] == 0)
    until("both members decide", lambda: all(standing(node)["votes_in"] == 0 for node in (one, two)))
    assert standing(liar)["votes_in"] > 0
    assert liar.status()["trouble"].startswith("this node's work has no weight: ")
    owner.signal(signal.SIGKILL)
    owner.wait()
    one.goes_on(3)
    assert standing(liar)["votes_in"] > 0
    for node in (one, two):
        assert "no weight" not in standing(node)["why"]
        fallen = [line for path in node.run_folder.glob("events.jsonl") for line in path.read_text().splitlines()]
        assert all(node.status()["peer"] not in line for line in fallen if '"unweighed"' in line)
    stop_all(one, two, liar)


def standing(node):
    return (node.status() or {}).get("standing") or {"weight_16": 16, "votes_in": 1, "why": ""}
