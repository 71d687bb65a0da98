"""`atoll model export hf`: the newest state on disk, or a snapshot, without a node; refusals are one line."""

import json
import sys
from pathlib import Path

import gguf
import msgspec
import pytest
import torch
from safetensors.torch import load_file

from atoll.node.checkpoint.local import LocalBody, begin_local
from atoll.node.checkpoint.snapshot import Snapshot, write_snapshot
from atoll.node.config.home import Home
from atoll.node.import_export.model_card import model_card
from atoll.node.learning.model import bridge
from atoll.node.learning.model.genesis import genesis
from atoll.node.learning.outer.fixed import state_digest
from atoll.protocols.local.control_messages import RoundStatus
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


def train(home: Path, run, seed=5, number=7, damage=0, averaged=None):
    """What a worker leaves after a round; `averaged`: seed of an average."""
    theta, arena_C4096 = state_of(run, seed)
    body = LocalBody(run.id, number, state_digest(arena_C4096), 1, ())
    arena_C4096[0, 0] += damage
    tensors = {"final": arena_C4096}
    if averaged is not None:
        tensors["average"] = state_of(run, averaged)[1]
    begin_local(Home(home).run(run.id) / "state", body, tensors).finish()
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
        "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip


def test_the_average_is_written_where_one_is_kept(atoll, tmp_path, run):
    train(tmp_path / "home", run, seed=5, averaged=9)
    log(tmp_path / "home", run, {"round": 7, "final": True, "contributors": ("ann",), "val_bpb": 3.25})
    theta, average_C4096 = state_of(run, 9)
    ran = atoll("export", "hf", str(tmp_path / "out"), "--average")
    assert ran.code == 0, ran.err
    assert f"round 7, {state_digest(average_C4096).hex()[:16]}" in ran.out
    found = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(found[name], value.float() * 2.0**-24) for name, value in theta.items())
    card = (tmp_path / "out/README.md").read_text()
    assert "8 of 54 rounds are in these weights, an average of final states" in card
    assert "no other member need have it" in card
    assert "3.2500 bits per byte after round 7, of the newest state; the average was not measured" in card
    assert "bit for bit" not in card


def test_an_average_that_is_not_kept_or_not_of_a_run_is_one_line(atoll, tmp_path, run):
    train(tmp_path / "home", run)
    for words, said in (
        (("export", "hf", str(tmp_path / "out")), "this node keeps no average of 'mixed'"),
        (("export", "hf", str(tmp_path / "out"), "--snapshot", "x"), "--average is kept beside the newest state"),
        (("generate", "A", "--from-hf", str(tmp_path)), "--average is of a run"),
        (("generate", "A"), "this node keeps no average"),
    ):
        ran = atoll(*words, "--average")
        assert (ran.code, ran.err.count("\n")) == (78, 1)
        assert said in ran.err
        assert not (tmp_path / "out").exists()


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
    assert "is already there; choose another, or --force for an export" in ran.err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_force_replaces_an_export_and_nothing_else(atoll, tmp_path, run):
    train(tmp_path / "home", run, seed=4, number=6)
    assert atoll("export", "hf", str(tmp_path / "out")).code == 0
    _, state = train(tmp_path / "home", run)
    assert atoll("export", "hf", str(tmp_path / "out")).code == 78
    assert "6 " not in atoll("export", "hf", str(tmp_path / "out"), "--force").err
    assert state.hex() in (tmp_path / "out/README.md").read_text()
    (tmp_path / "out/notes.txt").write_text("mine")
    ran = atoll("export", "hf", str(tmp_path / "out"), "--force")
    assert (ran.code, "--force replaces nothing but an export" in ran.err) == (78, True)
    assert (tmp_path / "out/notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "out"]


def test_an_export_stays_where_its_successor_cannot_be_written(atoll, tmp_path, run, monkeypatch):
    train(tmp_path / "home", run)
    assert atoll("export", "hf", str(tmp_path / "out")).code == 0
    rename = Path.rename

    def full(path, to):
        if path.suffix == ".part":
            raise OSError(28, "No space left on device")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", full)
    ran = atoll("export", "hf", str(tmp_path / "out"), "--force")
    assert (ran.code, "nothing was exported" in ran.err) == (1, True)
    assert (tmp_path / "out/model.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "out"]


def log(home, run, *rows):
    lines = [msgspec.json.encode(RoundStatus(peer="me", **row)).decode() for row in rows]
    (Home(home).run(run.id) / "rounds.jsonl").write_text("\n".join(lines) + "\n")


def test_the_card_says_what_the_weights_are(atoll, tmp_path, run):
    _, state = train(tmp_path / "home", run)
    log(
        tmp_path / "home", run,
        {"round": 5, "final": True, "contributors": ("ann", "ben"), "tokens": 1000, "val_bpb": 4.0},
        {"round": 7, "final": True, "contributors": ("ann",), "tokens": 500, "val_bpb": 3.25},
        {"round": 8, "final": True, "contributors": ("late",), "tokens": 9000, "val_bpb": 1.0},
        {"round": 9, "contributors": ("open",)},
    )  # fmt: skip
    ran = atoll("export", "hf", str(tmp_path / "out"))
    assert ran.err == "round 8 is final too, and not in it: this node has not saved it yet\n"
    card = (tmp_path / "out/README.md").read_text()
    for said in (
        f"`mixed`, id `{run.id.hex()}`", "8 of 54 rounds", state.hex(), "1,873,280", "`synthetic:markov`",
        "1,500 by", "3.2500 bits per byte after round 7", "2 members",
        "- `ann`: 2 rounds\n- `ben`: 1 round\n", "Not stated",
    ):  # fmt: skip
        assert said in card, said
    assert "late" not in card
    assert "open" not in card
    assert json.loads(atoll("export", "hf", str(tmp_path / "again"), "--json").out)["newer"] == 8
    log(tmp_path / "home", run, {"round": 7, "final": True})
    assert json.loads(atoll("export", "hf", str(tmp_path / "third"), "--json").out)["newer"] is None


def test_a_strangers_name_is_no_markdown(run):
    made = msgspec.structs.replace(run, name="x`|<script>\n# [y](http://z)\n---")
    card = model_card(made, 7, bytes(32), [])
    assert "\n# x???script?" in card
    assert card.count("\n---\n") == 1, "the front matter ends once"
    assert not [one for one in ("<script>", "[y]", "](") if one in card]


@pytest.fixture
def dense(atoll, tmp_path):
    made = atoll("run", "new", "dense", "--preset", "tiny", "--data", "synthetic:markov", "--seed", "1")
    assert made.code == 0, made.err
    return open_run((tmp_path / "home/runs/dense.run").read_bytes())


def test_a_dense_model_is_written_as_gguf(atoll, tmp_path, dense):
    _, state = train(tmp_path / "home", dense)
    ran = atoll("export", "gguf", str(tmp_path / "out.gguf"), "--json")
    assert ran.code == 0, ran.err
    said = json.loads(ran.out)
    assert (said["class"], said["round"], said["digest"]) == ("llama", 7, state.hex())
    about = gguf.GGUFReader(tmp_path / "out.gguf").fields
    assert about["atoll.state_digest"].contents() == state.hex()
    assert about["atoll.run"].contents() == dense.id.hex()
    assert "round: 8 of 54 rounds are in these weights; " in about["general.description"].contents()
    assert atoll("export", "gguf", str(tmp_path / "out.gguf")).code == 78
    assert atoll("export", "gguf", str(tmp_path / "out.gguf"), "--force").code == 0


def test_a_mixture_is_no_gguf_and_no_package_is_one_line(atoll, tmp_path, run, monkeypatch):
    train(tmp_path / "home", run)
    ran = atoll("export", "gguf", str(tmp_path / "out.gguf"))
    assert (ran.code, ran.err.count("\n")) == (78, 1)
    assert "a mixture of experts is not written as GGUF; export a folder" in ran.err
    assert not (tmp_path / "out.gguf").exists()
    monkeypatch.setitem(sys.modules, "gguf", None)
    for name in ("export_gguf", "gguf_file"):
        monkeypatch.delitem(sys.modules, f"atoll.node.import_export.{name}", raising=False)
    ran = atoll("export", "gguf", str(tmp_path / "out.gguf"))
    assert ran.err == "error: `atoll model export gguf` needs the package gguf; pip install 'atoll[gguf]'\n"
