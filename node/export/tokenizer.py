"""The tokenizer of a run as the files that Hugging Face reads: data, no code."""

import json
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

FILE = "tokenizer.json"


def byte_tokenizer() -> str:
    """The tokenizer `bytes` as JSON: token b is the byte b, and nothing is ever merged."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(_letters())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str()


def tokenizer_files(serialised: str, context: int) -> dict[str, str]:
    """File names and texts. `serialised` is the tokenizer's JSON."""
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    return {FILE: serialised, "tokenizer_config.json": json.dumps(about, indent=2)}


def is_same(data: bytes, serialised: str) -> bool:
    """Whether two legal tokenizers give the same tokens."""
    return _parts(data.decode()) == _parts(serialised)


def _letters() -> list[str]:
    """The letter that byte-level tokenizers write for each byte (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def _parts(text: str) -> dict[str, Any]:
    """What decides which tokens a text has, as this version of the library writes it."""
    whole = json.loads(Tokenizer.from_str(text).to_str())
    keys = ("normalizer", "pre_tokenizer", "model", "added_tokens", "decoder")
    return {key: whole.get(key) for key in keys}
