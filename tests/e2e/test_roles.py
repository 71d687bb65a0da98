"""Real nodes that do not train, beside two that do: an evaluator, a seeder without the text, a relay."""

import pytest

from tests.e2e.conftest import stop_all

pytestmark = pytest.mark.swarm


@pytest.mark.slow(
    slice=(
        "tests/node/virtual/test_virtual_roles.py::test_no_round_waits_for_a_node_that_does_not_train, "
        "tests/node/virtual/test_virtual_roles.py::"
        "test_trainers_believe_an_evaluator_whose_value_is_theirs_and_validate_no_more, "
        "tests/node/virtual/test_virtual_leaving.py::test_who_leaves_last_stays_until_a_seeder_has_the_state"
    )
)
def test_roles_besides_training(nodes, until, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 3000)
    owner, other, evaluator, seeder, relay = (nodes(name) for name in ("owner", "other", "eval", "seed", "relay"))
    run = str(owner.new_run("--data", str(text)))
    own_pace = ("--eval-every", "0")
    owner.start("--run", "tiny", *own_pace).up()
    join = ("--run", run, "--seed", owner.seed())
    other.start(*join, "--data", str(text), *own_pace).up()
    until("two train", lambda: any(len(row["contributors"]) == 2 for row in owner.rows()))
    text.rename(tmp_path / "elsewhere.txt")
    seeder.start(*join, "--role", "seed").up()
    evaluator.start(*join, "--data", str(tmp_path / "elsewhere.txt"), "--role", "evaluate").up()
    relay.start(*join, "--role", "relay")

    until("an evaluator is believed", lambda: owner.status()["val_by"] == evaluator.status()["peer"])
    rows = [row for row in owner.rows() if row["val_bpb"] is not None]
    found = {row["digest"]: row["val_bpb"] for row in evaluator.rows() if row["val_bpb"] is not None}
    taken = {row["digest"]: row["val_bpb"] for row in rows if row["val_by"]}
    assert taken
    assert taken.items() <= found.items()
    own = {row["digest"]: row["val_bpb"] for row in rows if not row["val_by"]}
    assert own.keys() & found.keys()
    assert all(abs(own[state] - found[state]) <= 1e-6 for state in own.keys() & found.keys())

    until("all know the final rounds", lambda: min(node.final() for node in (evaluator, seeder, relay)) >= 5)
    now = relay.status()
    assert (now["activity"], now["roles"], now["worker_pid"], now["trouble"]) == ("observing", ("relay",), 0, "")
    assert now["relaying"]
    relay.atoll("eval").refused(78, "holds no model")
    seeder.atoll("eval").refused(78, "reads no text")
    digests = {}
    for node in (owner, evaluator, seeder, relay):
        for row in node.rows():
            if row["final"]:
                digests.setdefault(row["round"], set()).add(row["digest"])
    assert {len(found) for found in digests.values()} == {1}
    peers = {row["contributors"] for row in map(_hashable, owner.rows()) if row["final"]}
    assert max(map(len, peers)) == 2
    assert evaluator.atoll("status").out.count("validated") == 1
    stop_all(relay, seeder, evaluator, other, owner)


def _hashable(row):
    return {**row, "contributors": tuple(row["contributors"])}
