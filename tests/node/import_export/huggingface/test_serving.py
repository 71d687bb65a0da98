"""What a folder says of special tokens, chat and sampling: read as transformers does, or refused in one line."""

import json

import pytest
from msgspec.structs import replace

from atoll.node.import_export.huggingface.config import config_from_model
from atoll.node.import_export.huggingface.serving import (
    read_serving,
    sampling_fields,
    special_token_fields,
    tokenizer_files,
)
from atoll.protocols.errors import ConfigError
from atoll.protocols.run.sections.serving import TEMPLATE_MAX_BYTES, SamplingSpec, ServingSpec, TokensSpec
from tests.node.import_export.huggingface.test_transformers import DENSE

VOCAB = 256
ADDED = [{"id": 1, "content": "<s>"}, {"id": 9, "content": "<|end|>"}]
TOKENIZER = json.dumps({"model": {"vocab": {"a": 0, "</s>": 2}}, "added_tokens": ADDED})
CONFIG, GENERATION, ABOUT = "config.json", "generation_config.json", "tokenizer_config.json"


def folder(tmp_path, files):
    """A folder with these files; `config.json` without special tokens unless it is given."""
    plain = config_from_model(DENSE) | special_token_fields(None)
    for name, value in ({"tokenizer.json": TOKENIZER, CONFIG: plain} | files).items():
        content = (
            value
            if isinstance(value, bytes)
            else (value if isinstance(value, str) else json.dumps(value)).encode()
        )
        (tmp_path / name).write_bytes(content)
    return tmp_path


CASES = {
    "nothing": ({}, ServingSpec()),
    "the configs of SmolLM2": (
        {
            CONFIG: config_from_model(DENSE) | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
            ABOUT: {"bos_token": "<s>", "eos_token": {"content": "<|end|>", "lstrip": False}, "unk_token": None},
        },
        ServingSpec(bos=1, eos=(2,), pad=2, tokens=TokensSpec(bos=1, eos=9)),
    ),
    "generation goes before the model": (
        {
            CONFIG: config_from_model(DENSE) | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None},
            GENERATION: {
                "eos_token_id": [9, 2, 9], "do_sample": True, "temperature": 1, "top_k": 20, "top_p": 0.9,
            },
        },
        ServingSpec(
            bos=1, eos=(9, 2), sampling=SamplingSpec(do_sample=True, temperature=1.0, top_k=20, top_p=0.9)
        ),
    ),
    "minus one is none": ({CONFIG: {**config_from_model(DENSE), "pad_token_id": -1, "eos_token_id": -1,
                                    "bos_token_id": 0}},
                          ServingSpec(bos=0)),
    "a Llama that says nothing": ({CONFIG: config_from_model(DENSE)}, ServingSpec(bos=1, eos=(2,))),
    "tokens that the tokenizer lacks": ({ABOUT: {"pad_token": "[PAD]", "eos_token": 7}}, ServingSpec()),
    "the older map": (
        {"special_tokens_map.json": {"eos_token": "</s>", "bos_token": "a"}, ABOUT: {"bos_token": "<s>"}},
        ServingSpec(tokens=TokensSpec(bos=1, eos=2)),
    ),
    "a template in the file": ({ABOUT: {"chat_template": "inside"}, "chat_template.jinja": "outside"},
                               ServingSpec(chat_template="outside")),
    "several templates": (
        {ABOUT: {"chat_template": [{"name": "tool", "template": "x"}, {"name": "default", "template": "y"}]}},
        ServingSpec(chat_template="y"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_a_folder_says(tmp_path, name):
    files, expected = CASES[name]
    assert read_serving(folder(tmp_path, files), VOCAB) == expected


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({GENERATION: {"eos_token_id": 256}}, "256 is no token of a model that has 256"),
        ({GENERATION: {"eos_token_id": [1, "2"]}}, "eos_token_id = '2' is not a whole number"),
        ({GENERATION: {"eos_token_id": list(range(70))}}, "serving.eos: Expected array of length <= 64"),
        ({GENERATION: {"bos_token_id": True}}, "bos_token_id = True"),
        ({GENERATION: {"pad_token_id": -2}}, "-2 is no token"),
        ({GENERATION: {"temperature": "hot"}}, "generation_config.json: temperature = 'hot' is not a number"),
        ({GENERATION: {"temperature": -1.0}}, "temperature"),
        ({GENERATION: '{"top_p": NaN}'}, "top_p"),
        ({GENERATION: {"top_k": 1.5}}, "top_k = 1.5"),
        ({GENERATION: {"top_k": 1 << 40}}, "top_k"),
        ({GENERATION: {"do_sample": "yes"}}, "do_sample = 'yes'"),
        ({GENERATION: "[]"}, "not a JSON object"),
        ({ABOUT: "{"}, "is not JSON"),
        ({ABOUT: " " * (5 << 20)}, "more than 4 MiB"),
        ({ABOUT: {"chat_template": 3}}, "chat_template is no text"),
        ({ABOUT: {"chat_template": "x" * (TEMPLATE_MAX_BYTES + 1)}}, "more than 16 KiB"),
        ({ABOUT: '{"chat_template": "\\ud800"}'}, "chat_template is no text"),
        ({"chat_template.jinja": b"\xff"}, "chat_template.jinja is no text"),
        ({"chat_template.jinja": "ü" * TEMPLATE_MAX_BYTES}, "more than 16 KiB"),
        ({"chat_template.jinja": "x" * (TEMPLATE_MAX_BYTES - 1) + "ü"}, "more than 16 KiB"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path, files, said):
    with pytest.raises(ConfigError, match=said) as caught:
        read_serving(folder(tmp_path, files), VOCAB)
    assert "\n" not in caught.value.line()


def test_a_top_k_of_minus_one_is_none(tmp_path):
    assert read_serving(folder(tmp_path, {GENERATION: {"top_k": -1}}), VOCAB).sampling.top_k is None


def test_what_is_written_says_the_same(tmp_path):
    told = ServingSpec(
        bos=1, eos=(9, 2), pad=0, tokens=TokensSpec(bos=1, eos=9, pad=2), chat_template="{{ messages }}",
        sampling=SamplingSpec(do_sample=False, repetition_penalty=1.1),
    )  # fmt: skip
    files = tokenizer_files(TOKENIZER, 8, told) | {GENERATION: special_token_fields(told) | sampling_fields(told)}
    assert read_serving(folder(tmp_path, files), VOCAB) == told


@pytest.mark.parametrize("eos", [(3, 3), (-1,), (256,), tuple(range(65))])
def test_a_run_with_ends_that_cannot_be_is_refused(eos):
    with pytest.raises(ConfigError, match="serving"):
        replace(ServingSpec(), eos=eos).check(VOCAB)
