"""A tokenizer of a stranger: published kinds run, everything else is refused in one line, and in time."""

import json
from threading import Event

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from atoll.node.learning.data import given as module
from atoll.node.learning.data.given import check_pattern, open_tokenizer, run_within, vocab_of
from atoll.node.learning.data.tokens import SubwordTokenizer, train_bpe
from atoll.protocols.errors import ConfigError
from tests.node.daemon.published import TEXT, WORDS, llama_like, qwen_like, size, trained

MADE = {"qwen": qwen_like(), "llama": llama_like(), "gpt2": trained(pre_tokenizers.ByteLevel())}


def changed(**changes):
    whole = json.loads(MADE["qwen"].to_str())
    for path, value in changes.items():
        at = whole
        *keys, last = path.split("__")
        for key in keys:
            at = at[key]
        at[last] = value
    return json.dumps(whole).encode()


@pytest.mark.parametrize("kind", MADE)
def test_published_kinds_give_the_librarys_tokens(kind):
    found = open_tokenizer(MADE[kind].to_str().encode(), size(MADE[kind]))
    assert found.encode(TEXT.encode()).tolist() == MADE[kind].encode(TEXT, add_special_tokens=False).ids
    assert found.identity == MADE[kind].to_str().encode()


@pytest.mark.parametrize("kind", MADE)
def test_a_model_gets_as_many_rows_as_its_tokenizer_needs(kind):
    data = MADE[kind].to_str().encode()
    vocab = vocab_of(data)
    assert size(MADE[kind]) <= vocab <= size(MADE[kind]) + min(64, vocab // 16)
    open_tokenizer(data, vocab)


def test_rows_are_a_multiple_of_64_where_the_padding_is_small():
    words = {f"w{at}": at for at in range(1000)}
    data = Tokenizer(models.BPE(vocab=words, merges=[])).to_str().encode()
    assert vocab_of(data) == 1024
    few = Tokenizer(models.BPE(vocab=dict(list(words.items())[:70]), merges=[])).to_str().encode()
    assert vocab_of(few) == 70
    with pytest.raises(ConfigError, match="tokens up to"):
        vocab_of(Tokenizer(models.BPE(vocab={"a": 0, "b": 9000}, merges=[])).to_str().encode())


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.sampled_from("aé你🙂 \n\t1,<end>s'"), max_size=60), kind=st.sampled_from([*MADE]))
def test_bytes_of_all_tokens_are_those_of_the_text(text, kind):
    found = open_tokenizer(MADE[kind].to_str().encode(), size(MADE[kind]))
    tokens, sizes = found.encode_sized(text.encode())
    assert tokens.tolist() == found.encode(text.encode()).tolist()
    assert len(sizes) == len(tokens)
    assert sizes.min(initial=0) >= 0
    assert sizes.sum() == (len(text.encode()) if len(tokens) else 0)


def test_a_letter_of_many_tokens_counts_once():
    found = open_tokenizer(MADE["gpt2"].to_str().encode(), size(MADE["gpt2"]))
    tokens, sizes = found.encode_sized("x𓀀y".encode())
    assert len(tokens) >= 4
    assert sizes.sum() == 6
    assert (sizes == 0).any(), "the other tokens of the letter"


def test_the_bpe_of_the_run_counts_as_the_letters_of_its_tokens_did():
    bpe = train_bpe(TEXT.encode())
    assert isinstance(bpe, SubwordTokenizer)
    library = Tokenizer.from_str(bpe.identity.decode())
    tokens, sizes = bpe.encode_sized(b"The cat sat on a mat\n")
    assert np.cumsum(sizes)[-1] == 21
    assert all(
        library.decode(tokens[: at + 1].tolist()) == "The cat sat on a mat\n"[:end]
        for at, end in enumerate(sizes.cumsum())
    )


def test_padding_and_cutting_are_switched_off():
    tokenizer = qwen_like()
    tokenizer.enable_padding(length=100_000)
    tokenizer.enable_truncation(2)
    found = open_tokenizer(tokenizer.to_str().encode(), size(tokenizer))
    assert found.encode(b"The cat sat").tolist() == MADE["qwen"].encode("The cat sat").ids


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "no byte-pair encoding"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (changed(model__type="Unigram"), "no byte-pair encoding"),
        (changed(model__type={"a": 1}), "no byte-pair encoding"),
        (changed(model__dropout=0.1), "model.dropout"),
        (changed(model__merges=[["no", "such"]]), "tokenizer.json: "),
        (changed(model__vocab={"a": -1}), "tokenizer.json: "),
        (changed(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "normalizer 'Precompiled'"),
        (changed(normalizer={"type": "Lowercase"}), "normalizer 'Lowercase'"),
        (changed(normalizer="NFC"), "normalizer 'None'"),
        (changed(normalizer={"type": "Prepend", "prepend": "x" * 99}), "more than one letter"),
        (changed(normalizer={"type": "Replace", "pattern": {"Regex": ""}, "content": "a"}), "no expression"),
        (changed(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}] * 2}), "more parts"),
        (changed(pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "Digits"}] * 99}), "more parts"),
        (changed(pre_tokenizer={"type": "Python", "code": "print(1)"}), "pre_tokenizer 'Python'"),
        (changed(decoder={"type": "Replace", "pattern": {"Regex": "(a+)+"}}), "repeats a group"),
        (changed(added_tokens=[{"id": 1 << 40, "content": "x"}]), "tokenizer.json: "),
    ],
)  # fmt: skip
def test_what_is_no_harmless_tokenizer_is_refused_in_one_line(data, said):
    with pytest.raises(ConfigError) as caught:
        open_tokenizer(data, size(MADE["qwen"]))
    assert said in caught.value.line()
    assert "\n" not in caught.value.line()


LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
MARKS = {"type": "Punctuation", "behavior": "Isolated"}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "Sequence", "normalizers": [], "pretokenizers": [LEVEL, LEVEL]},
        {"type": "Sequence", "normalizers": [], "pretokenizers": [MARKS]},
        {"type": "Sequence", "pretokenizers": 5},
        {"type": "Sequence", "pretokenizers": None},
        {"type": "Sequence"},
    ],
)
def test_parts_do_not_hide_in_a_sequence(part):
    with pytest.raises(ConfigError):
        open_tokenizer(changed(pre_tokenizer=part), size(MADE["qwen"]))


def test_a_text_is_not_said_again_and_again():
    """A template may name the text any number of times, without a special token."""
    text = {"Sequence": {"id": "A", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [text] * 50,
        "pair": [text, {"Sequence": {"id": "B", "type_id": 0}}],
    }
    given = open_tokenizer(changed(post_processor={**template, "special_tokens": {}}), size(MADE["qwen"]))
    assert given.encode(TEXT.encode()).tolist() == MADE["qwen"].encode(TEXT, add_special_tokens=False).ids


def test_a_file_above_the_cap_is_not_parsed(monkeypatch):
    monkeypatch.setattr(module, "TOKENIZER_MAX_BYTES", 10)
    with pytest.raises(ConfigError, match="more than"):
        open_tokenizer(b"{" * 11, 5)


@pytest.mark.parametrize("off", [-1, 300, -300])
def test_a_vocabulary_of_another_model_is_refused(off):
    with pytest.raises(ConfigError, match=r"the model has"):
        open_tokenizer(MADE["qwen"].to_str().encode(), max(1, size(MADE["qwen"]) + off))


def test_a_padded_vocabulary_is_fine():
    tokenizer = open_tokenizer(MADE["qwen"].to_str().encode(), size(MADE["qwen"]) + 16)
    assert tokenizer.encode(b"ab").max() < size(MADE["qwen"])


def test_work_that_does_not_end_is_given_up():
    forever = Event()
    with pytest.raises(ConfigError, match="not done within"):
        run_within(0.01, forever.wait)
    forever.set()


def test_a_panic_of_the_library_is_one_line(capfd):
    """The engine panics after ten million steps back; nothing but the rule on expressions keeps it from that."""
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    with pytest.raises(ConfigError, match="retry-limit"):
        run_within(60, lambda: tokenizer.encode("a" * 28 + "b"))
    capfd.readouterr()


@pytest.mark.parametrize(
    "pattern",
    [
        WORDS, r"\s+", r"a++b?+c*?", r"(?:ab)?c", r"[[:alpha:]&&[^x]]+", r"\p{Lu}{2}", r"x{2,5}y{,3}z{1,}",
        r"[^\]\[]+", r"\x{1F600}+\u0041\x41", "a|b|", r"^\d$", "",
    ],
)  # fmt: skip
def test_harmless_expressions_pass(pattern):
    check_pattern(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a+)+$", r"(a|a)*", r"(?:a*){2}", r"(a{1,2})+", r"a{1,2}+", r"a**", r"a+{3}", r"(a)\1", r"\k<x>",
        r"\g<0>", r"(?<x>a)", r"(?<=a)b", r"(?>a)", r"(?x)a", r"(?#c)", r"a{99}", r"a{x}", r"\Qa\E",
        r"[](a+)+]", r"[^]](a+)+", r"\c(a+)+", r"\p(a+)+", "a" * 3000,
        "(" + "a?" * 5 + ")*", r"*", r"|+", "\\", "(?",
    ],
)  # fmt: skip
def test_expressions_that_could_take_for_ever_do_not(pattern):
    with pytest.raises(ConfigError, match="is not run"):
        check_pattern(pattern)
