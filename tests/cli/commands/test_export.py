"""`atoll export hf`: the newest state on disk, or a snapshot, without a node; refusals are one line."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atoll.node.checkpoint.local import LocalBody, begin_local
from atoll.node.checkpoint.snapshot import Snapshot, write_snapshot
from atoll.node.config.home import Home
from atoll.node.learning.model import bridge
from atoll.node.learning.model.genesis import genesis
from atoll.node.learning.outer.fixed import state_digest
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.run_spec import open_run


@pytest.fixture
def run(atoll, tmp_path):
    made = atoll("run", "new", "mixed", "--preset", "moe-smoke", "--data", "synthetic:markov", "--seed", "1")
    assert made.code == 0, made.err
    return open_run((tmp_path / "home/runs/mixed.run").read_bytes())


def state_of(run, seed):
    theta = {name: torch.from_numpy(value) for name, value in genesis(run.model, seed).items()}
    return theta, bridge.gather(theta, arena_of(run.model))


def train(home: Path, run, seed=5, number=7, damage=0):
    """What a worker leaves after a round."""
    theta, arena_C4096 = state_of(run, seed)
    body = LocalBody(run.id, number, state_digest(arena_C4096), 1, ())
    arena_C4096[0, 0] += damage
    begin_local(Home(home).run(run.id) / "state", body, {"final": arena_C4096}).finish()
    return theta, body.state


def test_the_newest_state_is_written(atoll, tmp_path, run):
    train(tmp_path / "home", run, seed=4, number=6)
    theta, state = train(tmp_path / "home", run)
    ran = atoll("export", "hf", str(tmp_path / "out"), "--json")
    assert ran.code == 0, ran.err
    said = json.loads(ran.out)
    assert (said["class"], said["round"], said["digest"]) == ("Qwen3MoeForCausalLM", 7, state.hex())
    assert said["parameters"] == 1_873_280
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == theta.keys()
    assert all(torch.equal(found[name], value.float() * 2.0**-24) for name, value in theta.items())
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip


def test_a_snapshot_is_written(atoll, tmp_path, run):
    theta, arena_C4096 = state_of(run, 9)
    snapshot = Snapshot(arena_C4096, 12, state_digest(arena_C4096))
    write_snapshot(tmp_path / "file", snapshot, arena_of(run.model))
    ran = atoll("export", "hf", str(tmp_path / "out"), "--run", "mixed", "--snapshot", str(tmp_path / "file"))
    assert ran.code == 0, ran.err
    assert "round 12" in ran.out
    name = "model.layers.3.mlp.experts.7.down_proj.weight"
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")[name], theta[name].float() * 2.0**-24)


def test_a_run_that_never_trained_has_nothing_to_write(atoll, tmp_path, run):
    ran = atoll("export", "hf", str(tmp_path / "out"))
    assert (ran.code, ran.err.count("\n")) == (78, 1)
    assert "no weights of 'mixed' in this home yet; train first" in ran.err
    assert not (tmp_path / "out").exists()


def test_weights_that_are_not_what_was_saved_are_refused(atoll, tmp_path, run):
    train(tmp_path / "home", run, damage=1)
    ran = atoll("export", "hf", str(tmp_path / "out"))
    assert ran.code == 1
    assert "do not have the digest" in ran.err
    assert not (tmp_path / "out").exists()


def test_a_snapshot_of_another_run_is_refused(atoll, tmp_path, run):
    (tmp_path / "file").write_bytes(b"no snapshot")
    for path in ("file", "missing"):
        ran = atoll("export", "hf", str(tmp_path / "out"), "--snapshot", str(tmp_path / path))
        assert ran.code == 1
        assert path in ran.err
        assert ran.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_what_is_there_stays(atoll, tmp_path, run):
    train(tmp_path / "home", run)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("mine")
    ran = atoll("export", "hf", str(tmp_path / "out"))
    assert ran.code == 78
    assert "is already there; choose a folder that is not" in ran.err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
