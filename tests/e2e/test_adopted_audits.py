"""Real nodes: three that train, and an evaluator that makes their audits."""

import pytest

from tests.e2e.conftest import stop_all

pytestmark = pytest.mark.swarm


@pytest.mark.slow(
    slice=(
        "tests/node/virtual/test_virtual_adopted_audits.py"
        "::test_trainers_measure_the_checked_share_and_sign_what_they_would_have_found, "
        "tests/node/virtual/test_virtual_adopted_audits.py"
        "::test_a_real_worker_that_does_not_train_finds_what_trainers_find"
    )
)
def test_trainers_adopt_the_audits_of_an_evaluator(nodes, until):
    trainers = owner, *others = [nodes(name) for name in ("owner", "one", "two")]
    evaluator = nodes("eval")
    run = str(
        owner.new_run(
            "--data", "synthetic:markov", "--set", "audit={}", "--set", "reduce=null",
            "--set", "audit.each=2", "--set", "audit.windows=32", "--set", "outer.stages=[[0,8]]",
            "--set", "inner.batch=8",
        )
    )  # fmt: skip
    owner.start("--run", "tiny").up()
    for node in others:
        node.start("--run", run, "--seed", owner.seed()).up()
    evaluator.start("--run", run, "--seed", owner.seed(), "--role", "evaluate").up()
    until("audits are adopted", lambda: sum(audits(node, "adopted") for node in trainers) >= 12)
    assert audits(evaluator, "made") >= 12
    assert "adopted /" in owner.atoll("status").out
    assert not any('"unweighed"' in path.read_text() for path in owner.run_folder.glob("*.jsonl"))
    stop_all(evaluator, *others, owner)


def audits(node, kind):
    standing = node.status()["standing"]
    return (standing or {}).get(f"audits_{kind}") or 0
