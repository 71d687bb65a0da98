"""`atoll data`: a text is packed, shown, and made into a run that needs no copy of it."""

import json
import shutil

import pytest

from atoll.node.learning.data.packed import open_packed
from atoll.node.runs.run_files import read_run
from atoll.p2p.blobs.store import BLOBS
from atoll.protocols.run.run_spec import PACKED


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.jsonl"
    rows = [{"text": f"text {at} " * 20, "lang": "en" if at % 4 else "nl"} for at in range(400)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_packed_text_makes_a_run_that_needs_no_copy(atoll, text, tmp_path):
    folder = tmp_path / "packed"
    ran = atoll("data", "pack", str(text), "--out", str(folder), "--shard-tokens", "5000")
    assert ran.code == 0, ran.err
    assert f"next: atoll run new NAME --data {folder}" in ran.out
    shown = json.loads(atoll("data", "show", str(folder), "--json").out)
    assert shown["tokens"] == shown["shards"] * shown["shard_tokens"]
    assert (shown["vocab"], shown["shard_bytes"]) == (256, shown["shard_tokens"])
    ran = atoll("run", "new", "words", "--data", str(folder), "--preset", "50m", "--even-if-too-large")
    assert ran.code == 0, ran.err
    assert "--data" not in ran.out, "nobody needs a copy"
    shutil.rmtree(folder)
    text.unlink()
    spec = read_run(tmp_path / "home/runs/words.run").spec
    assert (spec.data.source, spec.data.digest.hex()) == (PACKED + "packed", shown["index"])
    assert (spec.data.tokenizer, spec.model.vocab) == ("bytes", 256)
    found = open_packed(spec, tmp_path / "home/runs" / spec.id.hex() / BLOBS)
    assert found.num_windows > 0
    assert "data       packed:packed" in atoll("run", "show", "words").out


def test_the_packed_tokenizer_travels_with_the_run(atoll, text, tmp_path):
    folder = tmp_path / "packed"
    assert atoll("data", "pack", str(text), "--out", str(folder), "--tokenizer", "bpe8k").code == 0
    ran = atoll("run", "new", "words", "--data", str(folder), "--json")
    assert ran.code == 0, ran.err
    spec = json.loads(ran.out)["spec"]
    assert spec["data"]["tokenizer"] == "file"
    assert spec["data"]["tokenizer_blob"]
    assert spec["model"]["vocab"] == json.loads(atoll("data", "show", str(folder), "--json").out)["vocab"]


def test_weights_and_filters(atoll, text, tmp_path):
    folder = tmp_path / "packed"
    words = ("data", "pack", str(text), str(text), "--weights", "1,3", "--where", "lang=en", "--out", str(folder))
    ran = atoll(*words, "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["shares"] == [pytest.approx(1 / 3), 1.0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("missing.txt", "--out", "to"), "missing.txt"),
        (("text.jsonl", "--out", "."), "exists already"),
        (("text.jsonl", "--out", "to", "--weights", "1,2"), "1 numbers above 0 are needed"),
        (("text.jsonl", "--out", "to", "--weights", "x"), "not numbers"),
        (("text.jsonl", "--out", "to", "--column", "body"), "--column"),
        (("text.jsonl", "--out", "to", "--where", "lang"), "not COLUMN=VALUE"),
        (("text.jsonl", "--out", "to", "--where", "lang=fr"), "no text to train on"),
        (("text.jsonl", "--out", "to", "--tokenizer", "missing.json"), "no tokenizer at"),
        (("text.jsonl", "picture.png", "--out", "to"), "no text"),
        (("hf:missing/data?what=1", "--out", "to"), "unreadable data set"),
    ],
)
def test_what_cannot_be_packed_is_one_line_and_leaves_nothing(atoll, text, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    ran = atoll("data", "pack", *words)
    assert (ran.code, ran.err.count("\n")) == (78, 1), ran.err
    assert said in ran.err
    assert {path.name for path in tmp_path.iterdir()} <= {"text.jsonl", "picture.png", "home"}


def test_a_run_of_a_packed_text_refuses_what_was_said_when_it_was_packed(atoll, text, tmp_path):
    folder = tmp_path / "packed"
    assert atoll("data", "pack", str(text), "--out", str(folder)).code == 0
    for words, said in [
        (("--column", "body"), "it has no columns"),
        (("--tokenizer", "bytes"), "drop --tokenizer"),
        (("--set", "model.vocab=128"), "packed with 256 tokens"),
    ]:
        ran = atoll("run", "new", "t", "--data", str(folder), *words)
        assert (ran.code, ran.err.count("\n")) == (78, 1)
        assert said in ran.err
    next(folder.glob("0*.tokens")).write_bytes(b"damaged")
    ran = atoll("run", "new", "t", "--data", str(folder))
    assert (ran.code, ran.err.count("\n")) == (78, 1)
    assert "missing or damaged" in ran.err
    assert not (tmp_path / "home/runs/t.run").exists()
