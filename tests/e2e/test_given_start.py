"""Two real nodes in a run that starts from a published folder: the same first loss, and one digest."""

import json
import shutil

import numpy as np
import pytest
import torch

from atoll.node.learning.data.dataset import GivenTokenizer, open_dataset
from atoll.node.learning.data.shakespeare import default_cache
from atoll.node.learning.inner.evaluate import VAL_WINDOWS
from atoll.protocols.run.run_spec import open_run
from tests.later import GROUP
from tests.node.daemon.published import publish


def loss_of(model, windows):
    """Mean cross-entropy, nats per token."""
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(windows[:, :-1])).logits
    return float(
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(windows[:, 1:]).flatten())
    )


def windows_of(run_file, tokenizer):
    spec = open_run(run_file.read_bytes())
    given = GivenTokenizer(tokenizer, spec.model.vocab)
    return open_dataset(spec.data, spec.model.context, "", default_cache(), given).validation(VAL_WINDOWS)


def one_digest(*nodes):
    """Rounds that are final on all of them, each with one digest."""
    tables = [{row["round"]: row["digest"] for row in node.rows() if row["final"]} for node in nodes]
    common = set.intersection(*map(set, tables))
    assert all(len({table[number] for table in tables}) == 1 for number in common)
    return common


@GROUP
@pytest.mark.swarm
def test_two_nodes_begin_where_the_folder_ended(nodes, until, tmp_path):
    hf = tmp_path / "hf"
    model = publish(hf)
    owner, member = nodes("owner"), nodes("member")
    run = owner.new_run(
        "--data", "synthetic:markov", "--from-hf", str(hf), "--without-fit",
        "--set", "pace.min_members=2", "--set", "inner.lr=0.0001",
    )  # fmt: skip
    owner.start().up()
    said = until("the worker has the weights", lambda: (e := owner.atoll("eval", "--json")).code == 0 and e)
    found = json.loads(said.out)
    expected = loss_of(model, windows_of(run, hf / "tokenizer.json"))
    assert found["val_loss"] == pytest.approx(expected, abs=1e-4)
    copy = tmp_path / "copy.run"
    shutil.copy(run, copy)
    member.start("--run", str(copy), "--seed", owner.seed()).up()
    until("rounds are final on both", lambda: min(owner.final(), member.final()) >= 2)
    assert len(one_digest(owner, member)) >= 2
    assert np.isfinite(json.loads(member.atoll("eval", "--json").out)["val_loss"])
    member.stop()
    owner.stop()


@pytest.mark.slow(
    slice=(
        "test_two_nodes_begin_where_the_folder_ended, "
        "tests/node/daemon/assets/test_base_weights.py::test_a_node_says_what_it_waits_for"
    )
)
@pytest.mark.swarm
def test_a_member_alone_says_what_it_waits_for(nodes, until, tmp_path):
    publish(tmp_path / "hf")
    owner, member = nodes("owner"), nodes("member")
    run = owner.new_run("--data", "synthetic:markov", "--from-hf", str(tmp_path / "hf"), "--without-fit")
    member.start("--run", str(run))
    waits = "waiting for the tokenizer: nobody reachable has it yet"
    until("it waits for the tokenizer", lambda: (s := member.status()) and s["reason"] == waits)
    blobs = member.home.run(open_run(run.read_bytes()).id) / "blobs"
    member.process.terminate()
    member.wait()
    tokenizer = open_run(run.read_bytes()).data.tokenizer_blob.hex()
    for ending in ("blob", "manifest"):
        shutil.copy(owner.home.run(open_run(run.read_bytes()).id) / "blobs" / f"{tokenizer}.{ending}", blobs)
    member.start("--run", str(run)).up()
    waits = "waiting for the start weights: nobody reachable has them yet"
    until("it waits for the weights", lambda: (s := member.status()) and s["reason"] == waits)
    member.atoll("eval").refused(1, "does not have the start weights of the run yet")
    member.stop()
