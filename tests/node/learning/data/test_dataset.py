"""Tokens and windows: lossless, byte-exact weights, one tokenizer from one text, digests that are checked."""

import numpy as np
import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer

from atoll.node.learning.data import corpus, dataset, markov, tokens
from atoll.node.learning.data.dataset import measured, open_dataset
from atoll.node.learning.data.tokens import (
    BPE_VOCAB,
    ByteTokenizer,
    SubwordTokenizer,
    built_in_tokenizer,
    train_bpe,
)
from atoll.protocols.errors import ConfigError, DiskFault
from atoll.protocols.run.run_spec import DataSpec

SOURCE = "synthetic:markov?seed=1&size=65536"
TEXT = "".join(f"line {n}: schön & 東 {n * n}\n" for n in range(3000)).encode()


def spec_of(**changes):
    return DataSpec(**{"source": SOURCE, "tokenizer": "bytes", "digest": b"", **changes})


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(TEXT)


def test_windows_are_pieces_of_the_text(tmp_path):
    data = open_dataset(spec_of(), 32, "", tmp_path)
    train, _ = markov.markov_texts(markov.parse_markov(SOURCE))
    assert data.num_windows == (65536 - 1) // 32
    got = data.batch(np.array([0, 7, data.num_windows - 1]))
    assert (got.shape, got.dtype) == ((3, 33), np.dtype(np.int64))
    assert bytes(got[1].astype(np.uint8)) == train[7 * 32 : 7 * 32 + 33]
    assert bytes(got[2].astype(np.uint8)) == train[(data.num_windows - 1) * 32 :][:33]


def test_validation_is_bounded_spread_and_constant(tmp_path):
    data = open_dataset(spec_of(), 32, "", tmp_path)
    few, every = data.validation(10), data.validation(10**9)
    assert few.shape == (10, 33)
    assert every.shape == ((8192 - 1) // 32, 33)
    assert np.array_equal(few, data.validation(10))
    assert np.array_equal(few[1], every[25])
    assert data.validation_bytes(10) == 320


def test_a_text_other_than_the_runs_is_refused(tmp_path):
    right = measured(spec_of(), "", tmp_path).digest
    assert open_dataset(spec_of(digest=right), 32, "", tmp_path).digest == right
    with pytest.raises(ConfigError, match="not the text of this run") as caught:
        open_dataset(spec_of(digest=bytes(32)), 32, "", tmp_path)
    assert caught.value.hint


def test_the_size_is_that_of_the_text_and_checked(tmp_path):
    path = tmp_path / "t.txt"
    path.write_bytes(TEXT)
    found = measured(spec_of(source="file:t"), str(path), tmp_path)
    assert 0 <= len(TEXT) - found.size <= 1, "a letter between training and validation text may be in neither"
    assert open_dataset(found, 32, str(path), tmp_path).digest == found.digest
    with pytest.raises(ConfigError, match=f"has {found.size} bytes, and the run says {found.size + 1}"):
        open_dataset(replace(found, size=found.size + 1), 32, str(path), tmp_path)


def test_too_short_a_text_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="too short"):
        open_dataset(spec_of(), 16384, "", tmp_path)


def test_an_unknown_tokenizer_is_refused():
    with pytest.raises(ConfigError, match="gpt2"):
        built_in_tokenizer("gpt2", b"")


def text_of(bpe: SubwordTokenizer, tokens) -> bytes:
    return Tokenizer.from_str(bpe.identity.decode()).decode(tokens.tolist(), skip_special_tokens=False).encode()


def test_bytes_are_lossless():
    tokens = ByteTokenizer()
    every = bytes(range(256))
    assert tokens.encode(every).tolist() == list(every)
    assert [part.tolist() for part in tokens.encode_sized(b"ab")] == [[97, 98], [1, 1]]


def test_bpe_is_lossless_shorter_and_weighs_its_bytes(bpe):
    coded = bpe.encode(TEXT)
    assert text_of(bpe, coded) == TEXT
    assert len(coded) < len(TEXT) / 2
    assert coded.max() < BPE_VOCAB
    again, sizes = bpe.encode_sized(TEXT)
    assert np.array_equal(again, coded)
    assert sizes.sum() == len(TEXT)


def test_one_text_gives_one_bpe(bpe):
    assert train_bpe(TEXT).identity == bpe.identity
    assert train_bpe(TEXT.replace(b"line", b"mile")).identity != bpe.identity


def test_bpe_of_broken_utf8_does_not_fail(bpe):
    assert b"ab" in text_of(bpe, bpe.encode(b"ab\xff\xfe"))


def test_the_tokenizer_is_part_of_the_digest(tmp_path):
    path = tmp_path / "t.txt"
    path.write_bytes(TEXT)
    plain = measured(spec_of(source="file:t"), str(path), tmp_path).digest
    coded = measured(spec_of(source="file:t", tokenizer="bpe8k"), str(path), tmp_path).digest
    assert plain != coded
    assert plain == corpus.text_digest(corpus.load_corpus("file:t", str(path), tmp_path))
    data = open_dataset(spec_of(source="file:t", tokenizer="bpe8k", digest=coded), 64, str(path), tmp_path)
    windows = (len(data.val_N) - 1) // 64
    assert data.validation_bytes(10**9) == data.val_bytes_N[1 : windows * 64 + 1].sum()
    assert data.val_bytes_N.sum() == len(corpus.load_corpus("file:t", str(path), tmp_path).val)


def same(one, other):
    assert (one.digest, one.context) == (other.digest, other.context)
    for name in ("train_N", "val_N", "val_bytes_N"):
        ours, theirs = getattr(one, name), getattr(other, name)
        assert (ours.dtype, ours.tolist()) == (theirs.dtype, theirs.tolist())


def forbid(monkeypatch, *names):
    def refused(*_):
        raise AssertionError("it was done again")

    for module, name in names:
        monkeypatch.setattr(module, name, refused)


LEARNED = (dataset, "built_in_tokenizer")
"""What a start does for the tokens of a text; for `bpe8k` it is 4 s of CPU."""


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe8k"])
def test_the_next_start_takes_the_tokens_of_the_last_one(tmp_path, monkeypatch, tokenizer):
    kept, spec = tmp_path / "tokens", measured(spec_of(tokenizer=tokenizer), "", tmp_path)
    first = open_dataset(spec, 32, "", tmp_path, kept=kept)
    same(first, open_dataset(spec, 32, "", tmp_path))
    forbid(monkeypatch, LEARNED, (corpus, "load_corpus"))
    same(open_dataset(spec, 32, "", tmp_path, kept=kept), first)
    same(open_dataset(spec, 16, "", tmp_path, kept=kept), replace(first, context=16))


def test_a_text_of_the_users_is_still_checked(tmp_path, monkeypatch):
    kept, text = tmp_path / "tokens", tmp_path / "text"
    text.write_bytes(TEXT)
    spec = measured(spec_of(source="file:text", tokenizer="bpe8k"), str(text), tmp_path)
    first = open_dataset(spec, 32, str(text), tmp_path, kept=kept)
    with monkeypatch.context() as patched:
        forbid(patched, LEARNED)
        same(open_dataset(spec, 32, str(text), tmp_path, kept=kept), first)
    text.write_bytes(TEXT.replace(b"line 7:", b"line 8:"))
    with pytest.raises(ConfigError, match="not the text of this run"):
        open_dataset(spec, 32, str(text), tmp_path, kept=kept)


@pytest.mark.parametrize("place", [0, 40, -1])
def test_kept_tokens_that_changed_are_made_again(tmp_path, place):
    kept, spec = tmp_path / "tokens", measured(spec_of(), "", tmp_path)
    first = open_dataset(spec, 32, "", tmp_path, kept=kept)
    data = bytearray(kept.read_bytes())
    data[place] ^= 1
    for changed in (bytes(data), bytes(data[:place]), b""):
        kept.write_bytes(changed)
        same(open_dataset(spec, 32, "", tmp_path, kept=kept), first)
        assert tokens.kept_tokens(kept, first.digest) is not None, "they are kept anew"


def test_tokens_of_another_text_are_not_taken(tmp_path):
    kept, spec = tmp_path / "tokens", measured(spec_of(), "", tmp_path)
    other = measured(spec_of(source=SOURCE.replace("seed=1", "seed=2")), "", tmp_path)
    open_dataset(other, 32, "", tmp_path, kept=kept)
    same(open_dataset(spec, 32, "", tmp_path, kept=kept), open_dataset(spec, 32, "", tmp_path))


def test_nothing_is_kept_that_cannot_be_checked_or_saves_nothing_or_is_large(tmp_path, monkeypatch):
    kept, text = tmp_path / "tokens", tmp_path / "text"
    text.write_bytes(TEXT)
    open_dataset(spec_of(), 32, "", tmp_path, kept=kept)
    open_dataset(measured(spec_of(source="file:text"), str(text), tmp_path), 32, str(text), tmp_path, kept=kept)
    monkeypatch.setattr(tokens, "KEPT_MOST_BYTES", 70_000)
    open_dataset(measured(spec_of(), "", tmp_path), 32, "", tmp_path, kept=kept)
    assert not kept.exists()


def test_a_full_disk_keeps_nothing_and_stops_nobody(tmp_path, monkeypatch):
    spec = measured(spec_of(), "", tmp_path)

    def full(*_):
        raise DiskFault("no space left")

    monkeypatch.setattr(tokens, "write_whole", full)
    same(open_dataset(spec, 32, "", tmp_path, kept=tmp_path / "tokens"), open_dataset(spec, 32, "", tmp_path))
