"""Real nodes in a LoRA run: one is killed, one joins late, all have one digest, and each fetches the base once."""

import pytest

from atoll.protocols.run.run_spec import open_run
from tests.e2e.conftest import stop_all
from tests.e2e.late_join import kill_and_join
from tests.e2e.test_given_start import one_digest
from tests.node.daemon.published import publish

pytestmark = pytest.mark.swarm


@pytest.mark.slow(
    slice=(
        "tests/node/worker/test_lora.py::test_rounds_have_one_digest_through_a_restart_and_a_late_join, "
        "tests/e2e/test_given_start.py::test_two_nodes_begin_where_the_folder_ended"
    )
)
def test_a_kill_and_a_late_join_end_with_one_digest_and_a_base_that_came_once(nodes, until, tmp_path):
    publish(tmp_path / "hf")
    owner, second, late = nodes("owner"), nodes("second"), nodes("late")
    keys = ("model.lora_rank=4", "pace.min_members=2")
    run = owner.new_run(
        "--data", "synthetic:markov", "--from-hf", str(tmp_path / "hf"), "--without-fit",
        *(word for key in keys for word in ("--set", key)),
    )  # fmt: skip
    spec = open_run(run.read_bytes())

    def base_of(node):
        found = (node.home.run(spec.id) / "blobs" / f"{spec.base.hex()}.blob").stat()
        return found.st_ino, found.st_mtime_ns

    owner.start("--run", "tiny").up()
    join = ("--run", str(run), "--seed", owner.seed())
    second.start(*join).up()
    until("rounds of both are final", lambda: min(owner.final(), second.final()) >= 1)
    came = base_of(second)
    kill_and_join(until, owner, second, late, join)
    assert len(one_digest(owner, second, late)) >= 3
    assert base_of(second) == came, "who has the base does not fetch it again"
    base_of(late)
    stop_all(late, second, owner)
    exported = late.atoll("export", "peft", str(tmp_path / "adapter"), "--run", "tiny")
    assert exported.code == 0, exported.err
    assert f"{spec.model.parameters:,} parameters" in exported.out
