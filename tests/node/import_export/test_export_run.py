"""The tokenizer that leaves with a run is the run's own."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from atoll.node.import_export.export_run import tokenizer_json
from atoll.node.import_export.huggingface.serving import is_same_tokenizer, tokenizer_files
from atoll.node.learning.data import corpus
from atoll.node.learning.data.tokens import train_bpe
from atoll.protocols.errors import ConfigError
from atoll.protocols.run.run_spec import DataSpec
from tests.later import GROUP, transformers

pytestmark = GROUP


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"Line {n} says héllo to {n * n} wörlds, and 你好.\n" for n in range(3000)))
    return path


def test_the_tokens_of_a_bpe_run_are_the_same_in_transformers(tmp_path, text):
    loaded = corpus.load_corpus("file:text.txt", str(text), tmp_path)
    ours = train_bpe(loaded.train)
    spec = DataSpec(source="file:text.txt", tokenizer="bpe8k", digest=corpus.text_digest(loaded, ours.identity))
    serialised = tokenizer_json(spec, str(text), tmp_path)
    assert serialised.encode() == ours.identity
    for name, content in tokenizer_files(serialised, 64).items():
        (tmp_path / name).write_text(content)
    assert is_same_tokenizer((tmp_path / "tokenizer.json").read_bytes(), serialised)
    sample = "Line 17 says héllo\n to 289 wörlds, 你好  x"
    assert (
        transformers.AutoTokenizer.from_pretrained(tmp_path)(sample)["input_ids"]
        == ours.encode(sample.encode()).tolist()
    )


def test_another_text_is_refused(text):
    with pytest.raises(ConfigError, match="is not the text of this run"):
        tokenizer_json(
            DataSpec(source="file:text.txt", tokenizer="bpe8k", digest=bytes(32)), str(text), text.parent
        )


def test_bytes_need_no_text():
    spec = DataSpec(source="file:nowhere", tokenizer="bytes", digest=bytes(32))
    assert Tokenizer.from_str(tokenizer_json(spec, "", Path("nowhere"))).encode("añ").ids == list("añ".encode())
