"""The owner of a run excludes a member and takes its work out: three real nodes, by the command line."""

import pytest

from tests.e2e.conftest import stop_all

pytestmark = pytest.mark.swarm


@pytest.mark.slow(
    slice=(
        "tests/node/virtual/test_virtual_removal.py::test_the_others_go_on_without_the_excluded, "
        "tests/node/virtual/test_virtual_removal.py::"
        "test_the_work_of_the_excluded_is_taken_out_by_all_in_one_round, "
        "tests/node/virtual/test_virtual_removal.py::"
        "test_real_workers_hold_the_fold_of_the_sets_without_the_excluded"
    )
)
def test_the_owner_excludes_a_member_and_takes_its_work_out(nodes, until):
    owner, good, bad = (nodes(name) for name in ("owner", "good", "bad"))
    keys = ("pace.min_members=3", "pace.excise_rounds=40", "reduce=null")
    owner.new_run("--data", "synthetic:markov", *(word for key in keys for word in ("--set", key)))
    owner.start("--run", "tiny").up()
    for node in (good, bad):
        node.start("--run", str(owner.home.run_file("tiny")), "--seed", owner.seed()).up()
    until("rounds of all three are final", lambda: owner.final() >= 1)
    peer = bad.status()["peer"]
    good.atoll("run", "exclude", owner.status()["peer"]).refused(78, "owner cannot be excluded")
    voted = good.atoll("run", "exclude", peer)
    assert voted.code == 0, voted.err
    assert "1 of the 2 votes" in voted.out
    until("the vote is shown", lambda: [row["votes"] for row in bad.status()["votes_against"]] == [1])
    done = owner.atoll("run", "exclude", peer[-8:], "--reason", "noise", "--excise")
    assert done.code == 0, done.err
    until("it says why", lambda: "excluded this node" in bad.status()["trouble"])
    ended = bad.atoll("status", "--exit-code")
    assert ended.code == 4
    assert "noise" in ended.out.splitlines()[0]
    bad.atoll("resume").refused(78, "excluded this node")
    first = good.status()["excluded"][0]["round"]
    until("the others go on", lambda: min(owner.final(), good.final()) >= first + 5)
    late = [row for row in good.rows() if row["final"] and row["round"] > first]
    assert late
    assert not any(peer in row["contributors"] for row in late)
    corrected = [node.status()["excluded"][0] for node in (owner, good)]
    assert corrected[0] == corrected[1]
    assert corrected[0]["excise_since"] < corrected[0]["excised_in"] <= min(owner.final(), good.final())
    since = corrected[0]["excised_in"]
    states = [
        {row["round"]: row["own_digest"] for row in node.rows() if row["final"] and row["round"] >= since}
        for node in (owner, good)
    ]
    same = [number for number in states[0] if states[0][number] and states[1].get(number)]
    assert same
    assert all(states[0][number] == states[1][number] for number in same)
    stop_all(bad, good, owner)
