"""The owner of a run excludes a member: three real nodes, by the command line."""

import pytest

pytestmark = pytest.mark.swarm


def test_the_owner_excludes_a_member(nodes, until):
    owner, good, bad = (nodes(name) for name in ("owner", "good", "bad"))
    owner.new_run("--data", "synthetic:markov", "--set", "pace.min_members=3")
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
    done = owner.atoll("run", "exclude", peer[-8:], "--reason", "noise")
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
    for node in (bad, good, owner):
        node.stop()
