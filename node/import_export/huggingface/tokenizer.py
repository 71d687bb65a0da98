"""Writes a run's tokenizer as the files that Hugging Face reads: data, no code."""

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from atoll.protocols.run.serving import ServingSpec

TOKENIZER_JSON, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"


def byte_tokenizer_json() -> str:
    """The tokenizer `bytes` as the JSON of tokenizers: token b is byte b, and there are no merges."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(_letters())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str()


def tokenizer_files(serialised: str, context: int, serving: ServingSpec | None = None) -> dict[str, str]:
    """Names and texts of the tokenizer's files; `serialised` is its JSON."""
    about: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    if serving is not None:
        about |= _config_fields(serving, json.loads(serialised))
    return {TOKENIZER_JSON: serialised, TOKENIZER_CONFIG: json.dumps(about, indent=2)}


def token_ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Tokens of a parsed `tokenizer.json` -> their ids; malformed entries are skipped."""
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    pairs = list(vocab.items()) if isinstance(vocab, dict) else []
    for one in added if isinstance(added, list) else []:
        if isinstance(one, dict):
            pairs.append((one.get("content"), one.get("id")))
    return {text: number for text, number in pairs if isinstance(text, str) and type(number) is int}


def _config_fields(serving: ServingSpec, tokenizer: Mapping[str, Any]) -> dict[str, str]:
    """Keys of `tokenizer_config.json` for the named special tokens, as texts, and for the chat template."""
    texts = {number: text for text, number in token_ids(tokenizer).items()}
    named = {f"{name}_token": texts.get(getattr(serving.tokens, name)) for name in ("bos", "eos", "pad", "unk")}
    found = {**named, "chat_template": serving.chat_template or None}
    return {key: text for key, text in found.items() if text is not None}


def is_same_tokenizer(data: bytes, serialised: str) -> bool:
    """Whether two valid tokenizers give the same tokens for every text."""
    return _deciding_parts(data.decode()) == _deciding_parts(serialised)


def _letters() -> list[str]:
    """The character by which byte-level tokenizers write each byte (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def _deciding_parts(text: str) -> dict[str, Any]:
    """The parts of a tokenizer that decide its tokens, normalised by this version of the library."""
    whole = json.loads(Tokenizer.from_str(text).to_str())
    keys = ("normalizer", "pre_tokenizer", "model", "added_tokens", "decoder")
    return {key: whole.get(key) for key in keys}
