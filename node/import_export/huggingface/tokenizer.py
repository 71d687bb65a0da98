"""The tokenizer of a run as the files that Hugging Face reads: data, no code."""

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from atoll.protocols.run.serving import ServingSpec

FILE, ABOUT = "tokenizer.json", "tokenizer_config.json"


def byte_tokenizer() -> str:
    """The tokenizer `bytes` as JSON: token b is the byte b, and nothing is ever merged."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(_letters())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str()


def tokenizer_files(serialised: str, context: int, serving: ServingSpec | None = None) -> dict[str, str]:
    """File names and texts. `serialised` is the tokenizer's JSON."""
    about: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    if serving is not None:
        about |= _words(serving, json.loads(serialised))
    return {FILE: serialised, ABOUT: json.dumps(about, indent=2)}


def ids_of(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Token -> id, of a `tokenizer.json`; what is no such thing is left out."""
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    pairs = list(vocab.items()) if isinstance(vocab, dict) else []
    for one in added if isinstance(added, list) else []:
        if isinstance(one, dict):
            pairs.append((one.get("content"), one.get("id")))
    return {text: number for text, number in pairs if isinstance(text, str) and type(number) is int}


def _words(serving: ServingSpec, tokenizer: Mapping[str, Any]) -> dict[str, str]:
    """The named tokens as text, which is what the file has, and the template."""
    texts = {number: text for text, number in ids_of(tokenizer).items()}
    named = {f"{name}_token": texts.get(getattr(serving.tokens, name)) for name in ("bos", "eos", "pad", "unk")}
    found = {**named, "chat_template": serving.chat_template or None}
    return {key: text for key, text in found.items() if text is not None}


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
