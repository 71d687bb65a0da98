"""A run of real nodes is saved, and goes on with another number of them: weights and moments come along."""

import json
import shutil

import pytest

from atoll.node.checkpoint.local import load_local
from atoll.node.config.home import Home
from atoll.p2p.system.atomic_files import write_whole
from atoll.protocols.run.run_spec import open_run
from tests.e2e.conftest import nodes_in
from tests.e2e.test_given_start import one_digest
from tests.waiting import poll

pytestmark = [pytest.mark.swarm, pytest.mark.xdist_group("checkpoint")]
MIXTURE = (
    *("--preset", "moe-smoke", "--data", "synthetic:markov"),
    *("--set", "outer.holders=1", "--set", "pace.lease_s=30", "--set", "model.layers=1"),
)


def paused(until, *nodes):
    """All at rest at one final round."""
    for node in nodes:
        assert node.atoll("pause").code == 0

    def at_rest():
        found = [status for node in nodes if (status := node.status())]
        finals = {status["final"] for status in found}
        is_paused = {status["activity"] for status in found} == {"paused"}
        return is_paused and len(found) == len(nodes) and finals == {max(s["round"] for s in found) - 1}

    until("they rest at one round", at_rest)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two nodes trained for a while, rested, stopped and saved: their folder, what they saved, the manifest."""
    root = tmp_path_factory.mktemp("saved")
    folder = root / "saved"
    with nodes_in(root) as make:
        owner, member = make("owner"), make("member")
        run = owner.new_run(*MIXTURE, "--set", "pace.min_members=2")
        owner.start().up()
        member.start("--run", str(run), "--seed", owner.seed()).up()
        poll("rounds are final on both", lambda: min(owner.final(), member.final()) >= 2)
        paused(poll, owner, member)
        for node in (owner, member):
            node.stop()
            done = node.atoll("checkpoint", "save", str(folder))
            assert done.code == 0, done.err
        yield root, folder, json.loads(owner.atoll("checkpoint", "join", str(folder), "--json").out)["manifest"]


@pytest.mark.slow(
    slice=(
        "test_two_nodes_save_and_three_go_on, "
        "tests/node/virtual/test_virtual_restored.py::test_who_lost_its_ledger_goes_on_in_its_own_feed, "
        "tests/node/virtual/test_virtual_restored.py::test_an_identity_that_is_in_use_is_refused"
    )
)
def test_a_node_that_lost_its_home_goes_back_and_its_twin_is_refused(nodes, until, tmp_path, saved):
    root, folder, joined = saved
    shutil.copytree(root / "owner", tmp_path / "owner")
    owner, member, twin = nodes("owner"), nodes("member"), nodes("twin")
    key = Home(root / "member").identity.read_bytes()
    for node in (member, twin):
        node.home.make()
        write_whole(node.home.identity, key)
        restored = json.loads(node.atoll("checkpoint", "restore", str(folder), "--json").out)["restored"]
        assert restored == {"round": joined["round"], "state": joined["state"], "own": True, "feed": False}
    owner.start().up()
    member.start("--seed", owner.seed()).up()
    until("both go on", lambda: min(owner.final(), member.final()) >= joined["round"] + 3)
    assert len(one_digest(owner, member)) >= 2
    paused(until, owner, member)
    twin.start("--seed", owner.seed())
    assert twin.wait() == 1
    assert "another node that runs has this identity" in twin.said()
    twin.clean()
    for node in (owner, member):
        assert node.atoll("resume").code == 0
    member.goes_on()
    for node in (owner, member):
        node.stop()


def test_two_nodes_save_and_three_go_on(nodes, until, tmp_path, saved):
    _, folder, joined = saved
    assert {tuple(sorted(shard["steps"])) for shard in joined["shards"]} != {()}
    on = nodes("on")
    made = on.atoll("run", "new", "on", "--from-checkpoint", str(folder), "--set", "pace.min_members=3")
    assert made.code == 0, made.err
    spec = open_run(on.home.run_file("on").read_bytes())
    assert spec.start.state.hex() == joined["state"]
    assert spec.outer.rounds == 400 - joined["round"] - 1
    copy = tmp_path / "copy.run"
    shutil.copy(on.home.run_file("on"), copy)
    others = [nodes("second"), nodes("third")]
    on.start().up()
    for node in others:
        node.start("--run", str(copy), "--seed", on.seed()).up()
    until("rounds are final on all", lambda: min(node.final() for node in (on, *others)) >= 1)
    assert len(one_digest(on, *others)) >= 2
    of_experts = []
    for node in (on, *others):
        node.stop()
        state = load_local(node.home.run(spec.id) / "state", spec.id)
        steps = {name: float(value) for name, value in state.tensors.items() if name.startswith("step/")}
        assert steps["step/model.embed_tokens.weight"] > joined["round"], "also at nodes that fetched them"
        of_experts += [value for name, value in steps.items() if ".experts." in name]
    # Round 0 waits for nobody's fetch of experts: a member that comes a second later begins with fresh ones.
    assert any(value > joined["round"] for value in of_experts)
