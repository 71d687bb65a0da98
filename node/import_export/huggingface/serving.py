"""Reads special tokens, chat template and sampling of a Hugging Face folder as data, and writes them back.

The sources are `generation_config.json`, `config.json`, `tokenizer_config.json`, `special_tokens_map.json` and
`chat_template.jinja`, each if present. A token that the tokenizer's file lacks is ignored.

A run's tokenizer is written as the files that Hugging Face reads: data, no code.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from atoll.node.import_export.huggingface.config import FAMILIES
from atoll.node.import_export.huggingface.fields import CONFIG, read_float, read_int
from atoll.node.import_export.huggingface.weights import read_json
from atoll.protocols.errors import ConfigError
from atoll.protocols.run.sections.serving import TEMPLATE_MAX_BYTES, SamplingSpec, ServingSpec, TokensSpec

TOKENIZER_JSON, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
GENERATION, OLDER, TEMPLATE = "generation_config.json", "special_tokens_map.json", "chat_template.jinja"
_EITHER = f"{CONFIG} or {GENERATION}"
_FLOATS = ("temperature", "top_p", "repetition_penalty")
_NAMED = ("bos", "eos", "pad", "unk")
_JSON_MAX_BYTES = 4 << 20


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
    about |= tokenizer_fields(serving, serialised)
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


def tokenizer_fields(serving: ServingSpec | None, serialised: str) -> dict[str, str]:
    """Keys of `tokenizer_config.json` for the named special tokens, as texts, and for the chat template."""
    if serving is None:
        return {}
    texts = {number: text for text, number in token_ids(json.loads(serialised)).items()}
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


def read_serving(folder: Path, vocab: int) -> ServingSpec:
    """The serving options of a folder, for a model with `vocab` tokens. Raises ConfigError for invalid ones."""
    generation, about = _without_null(_json(folder / GENERATION)), _without_null(_json(folder / TOKENIZER_CONFIG))
    ids = {**_defaults(folder, vocab), **_without_null(_json(folder / CONFIG)), **generation}
    named = {**_without_null(_json(folder / OLDER)), **about}
    ends = ids.get("eos_token_id")
    found = ServingSpec(
        bos=_id(ids.get("bos_token_id"), "bos_token_id"),
        eos=tuple(dict.fromkeys(_ids(ends if isinstance(ends, list) else [ends]))),
        pad=_id(ids.get("pad_token_id"), "pad_token_id"),
        tokens=_named(named, token_ids(read_json(folder / TOKENIZER_JSON))),
        chat_template=_template(folder / TEMPLATE, about.get("chat_template")),
        sampling=_sampling(generation),
    )
    found.check(vocab)
    return found


def special_token_fields(serving: ServingSpec | None) -> dict[str, Any]:
    """Keys of `config.json` and `generation_config.json`; all are None for a run without serving options."""
    found = serving or ServingSpec()
    eos = found.eos[0] if len(found.eos) == 1 else list(found.eos) or None
    return {"bos_token_id": found.bos, "eos_token_id": eos, "pad_token_id": found.pad}


def sampling_fields(serving: ServingSpec | None) -> dict[str, Any]:
    """Keys of `generation_config.json` that a run sets."""
    found = (serving or ServingSpec()).sampling
    return _without_null({key: getattr(found, key) for key in ("do_sample", "top_k", *_FLOATS)})


def _without_null(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}


def _json(path: Path) -> dict[str, Any]:
    """The object of a JSON file; an empty one if there is no file. Raises ConfigError."""
    return read_json(path, _JSON_MAX_BYTES) if path.exists() else {}


def _defaults(folder: Path, vocab: int) -> dict[str, Any]:
    """What transformers assumes if neither config has a key; a small model may lack such tokens."""
    config = _json(folder / CONFIG)
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or (folder / GENERATION).exists():
        return {}
    ids = {"bos_token_id": family.bos, "eos_token_id": family.eos, "pad_token_id": family.pad}
    # A null in the config means no such token; only an absent key gets the default.
    return {key: value for key, value in ids.items() if key not in config and value is not None and value < vocab}


def _id(value: Any, key: str) -> int | None:
    """A token id; None for -1 too, which some configs have for no token."""
    return None if value is None or value == -1 else read_int({key: value}, key, _EITHER)


def _ids(values: list[Any]) -> list[int]:
    return [found for value in values if (found := _id(value, "eos_token_id")) is not None]


def _named(about: Mapping[str, Any], ids: Mapping[str, int]) -> TokensSpec:
    found: dict[str, int] = {}
    for name in _NAMED:
        value = about.get(f"{name}_token")
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and text in ids:
            found[name] = ids[text]
    return TokensSpec(**found)


def _template(path: Path, inside: Any) -> str:
    """The chat template of the file, else of the key; of several templates the one called `default`."""
    if path.exists():
        return _text(path)
    if isinstance(inside, list):
        inside = {str(one.get("name")): one.get("template") for one in inside if isinstance(one, dict)}
    found = inside.get("default") if isinstance(inside, dict) else inside
    if found is not None and not isinstance(found, str):
        raise ConfigError(f"{TOKENIZER_CONFIG}: chat_template is no text")
    return found or ""


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(TEMPLATE_MAX_BYTES + 1)
        # A longer template is refused later by its length; the cut here may go through a character.
        return data.decode(errors="strict" if len(data) <= TEMPLATE_MAX_BYTES else "replace")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text") from error


def _sampling(generation: Mapping[str, Any]) -> SamplingSpec:
    chosen = generation.get("do_sample")
    if chosen is not None and not isinstance(chosen, bool):
        raise ConfigError(f"{GENERATION}: do_sample = {chosen!r} is not true or false")
    top_k = read_int(generation, "top_k", GENERATION) if generation.get("top_k", -1) != -1 else None  # as in `_id`
    temperature, top_p, penalty = (
        read_float(generation, key, GENERATION) if key in generation else None for key in _FLOATS
    )
    return SamplingSpec(
        do_sample=chosen, temperature=temperature, top_p=top_p, top_k=top_k, repetition_penalty=penalty
    )
