"""Real nodes of a run whose text only its owner ever had: another one fetches what it trains on, and no more."""

import json
import random
import shutil

import pytest

from atoll.p2p.blobs.store import BLOBS
from tests.e2e.conftest import stop_all

pytestmark = pytest.mark.swarm


@pytest.mark.slow(
    slice=(
        "tests/node/daemon/assets/test_run_text.py::test_a_turns_shards_are_fetched_once_and_no_others, "
        "tests/node/daemon/assets/test_run_text.py::test_who_has_all_keeps_all_for_the_others, "
        "tests/node/virtual/test_virtual_leaving.py"
        "::test_members_that_leave_in_one_moment_leave_a_run_that_a_newcomer_goes_on_with, "
        "tests/node/virtual/test_virtual_leaving.py::test_who_leaves_last_stays_until_a_seeder_has_the_state"
    )
)
def test_a_node_without_the_text_fetches_its_shards(nodes, until, tmp_path):
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 8))) for _ in range(500)]
    text, folder = tmp_path / "text.jsonl", tmp_path / "packed"
    rows = ({"text": " ".join(rng.choices(words, k=150))} for _ in range(4000))
    text.write_text("\n".join(map(json.dumps, rows)))
    owner, other = nodes("owner"), nodes("other")
    packed = owner.atoll("data", "pack", str(text), "--out", str(folder), "--shard-tokens", "32768", "--json")
    about = json.loads(packed.out)
    run = str(owner.new_run("--data", str(folder), "--set", "audit={}", "--set", "reduce=null"))
    shutil.rmtree(folder)
    text.unlink()
    owner.start("--run", "tiny").up()
    other.start("--run", run, "--seed", owner.seed()).up()
    until("both train", lambda: sum(len(row["contributors"]) == 2 and row["final"] for row in other.rows()) >= 6)
    until(
        "a node audited the other",
        lambda: any('"audited"' in _events(node) for node in (owner, other)),
    )

    assert 1 <= _shards(other, about) <= about["shards"] / 4, (
        "the shards that it and those it audits read, and no others"
    )
    digests = {}
    for node in (owner, other):
        for row in node.rows():
            if row["final"]:
                digests.setdefault(row["round"], set()).add(row["digest"])
    assert {len(found) for found in digests.values()} == {1}
    keeper = nodes("keeper").start("--run", run, "--seed", owner.seed(), "--role", "seed").up()
    until("the seeder has all of it", lambda: _shards(keeper, about) == about["shards"])
    seed = keeper.seed()
    stop_all(other, owner)  # in one moment: neither may count on the other
    late = nodes("late").start("--run", run, "--seed", seed).up()
    until("a newcomer trains without the owner", lambda: any(row["train_loss"] for row in late.rows()))
    assert _shards(late, about) >= 1
    stop_all(late, keeper)


def _shards(node, about):
    return sum(path.stat().st_size == about["shard_bytes"] for path in (node.run_folder / BLOBS).glob("*.blob"))


def _events(node):
    return "".join(path.read_text() for path in node.run_folder.glob("*.jsonl"))
