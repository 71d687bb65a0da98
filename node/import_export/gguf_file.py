"""Writes a run's weights as one GGUF file, which llama.cpp and programs built on it read (docs/huggingface.md).

Dense models only: Llama, Qwen2, Qwen3 and Gemma. Values are float32, exact below 1; llama.cpp quantises further.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.node.import_export.huggingface.config import model_type_of
from atoll.node.import_export.huggingface.ffn_slices import dense_of, joined
from atoll.node.import_export.huggingface.serving import token_ids
from atoll.node.import_export.huggingface.weights import UNIT
from atoll.p2p.system.atomic_files import sync_folder
from atoll.protocols.errors import ConfigError, DiskFault
from atoll.protocols.run.model_spec import Atom, ModelSpec, atoms
from atoll.protocols.run.sections.serving import ServingSpec

MAGIC = b"GGUF"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN_2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_SPLITS = {_GPT2: "gpt-2", _LLAMA_3: "llama-bpe", _QWEN_2: "qwen2"}
"""Regular expressions that cut a text before byte pairs are merged, and llama.cpp's names for them."""
_NO_MERGE = "Ā Ā"
"""A merge of two zero bytes, which no text has: llama.cpp refuses a tokenizer without any merge."""


_ARCHITECTURES = {
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}


class GgufTokenizer(NamedTuple):
    """A byte-pair tokenizer in GGUF's form."""

    tokens: list[str]
    """By id, as many as the model has rows."""
    kinds: list[int]
    """`gguf.TokenType` of each."""
    merges: list[str]
    split: str
    """llama.cpp's name of the rule that cuts a text into words."""
    adds_bos: bool


def check_gguf(model: ModelSpec) -> str:
    """The GGUF architecture of a model. Raises ConfigError for a model that this module does not write."""
    if model.experts is not None:
        hint = "export a folder with `atoll model export hf`; llama.cpp's own converter reads some mixtures"
        raise ConfigError("a mixture of experts is not written as GGUF", hint=hint)
    return model_type_of(model)


def save_gguf(
    path: Path,
    model: ModelSpec,
    read: Callable[[str], Tensor],
    tokenizer: str,
    serving: ServingSpec | None,
    about: Mapping[str, str],
    *,
    replace: bool = False,
) -> str:
    """Write the file whole or not at all, and return its architecture.

    `read` gives an atom as int32; `tokenizer` is its JSON; `about`: metadata keys and texts. `replace` allows a
    GGUF file to be there. Raises ConfigError, DiskFault.
    """
    architecture = check_gguf(model)
    read, model = joined(model, read), dense_of(model)
    if path.exists() and not (replace and _is_gguf(path)):
        hint = (
            "--force replaces nothing but a GGUF file" if replace else "choose another, or --force for a GGUF file"
        )
        raise ConfigError(f"{path} is already there", hint=hint)
    part = path.absolute().with_name(f".{path.name}.{os.getpid()}.part")
    writer = gguf.GGUFWriter(part, architecture)
    try:
        _describe(writer, model, about)
        _add_tokenizer(writer, gguf_tokenizer(tokenizer, model.vocab, serving), serving)
        _write_tensors(writer, model, read)
        writer.close()
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
        sync_folder(path.absolute().parent)
    except OSError as error:
        raise DiskFault(f"{path}: {error.strerror or error}", hint="nothing was exported") from error
    finally:
        writer.close()
        part.unlink(missing_ok=True)
    return architecture


def gguf_tokenizer(serialised: str, vocab: int, serving: ServingSpec | None = None) -> GgufTokenizer:
    """A run's tokenizer for llama.cpp. Raises ConfigError for one that llama.cpp would apply differently."""
    whole: dict[str, Any] = json.loads(serialised)
    texts: dict[int, str] = {number: text for text, number in token_ids(whole).items() if number < vocab}
    added = {one["id"]: one for one in whole.get("added_tokens") or [] if one["id"] < vocab}
    tokens = [texts.get(number, f"[PAD{number}]") for number in range(vocab)]
    kinds = [_kind(number, texts, added) for number in range(vocab)]
    pairs = whole["model"].get("merges") or []
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in pairs] or [_NO_MERGE]
    adds_bos = "TemplateProcessing" in json.dumps(whole.get("post_processor")) and serving is not None
    if whole.get("normalizer"):
        raise ConfigError(
            "a tokenizer with a normaliser is not written as GGUF", hint="use `atoll model export hf`"
        )
    return GgufTokenizer(tokens, kinds, merges, _split_name(whole, has_merges=bool(pairs)), adds_bos)


def _kind(number: int, texts: Mapping[int, str], added: Mapping[int, Mapping[str, Any]]) -> int:
    if number in added:
        is_special = added[number].get("special")
        return gguf.TokenType.CONTROL if is_special else gguf.TokenType.USER_DEFINED
    return gguf.TokenType.NORMAL if number in texts else gguf.TokenType.UNUSED


def _split_name(whole: Mapping[str, Any], *, has_merges: bool) -> str:
    """llama.cpp's name of the rule by which a text is cut before pairs are merged. Raises ConfigError."""
    if not has_merges:  # every byte is a token, wherever the text is cut
        return "gpt-2"
    steps = whole.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    patterns = [step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"]
    byte_level = [step for step in steps if step.get("type") == "ByteLevel"]
    if len(steps) == len(patterns) + len(byte_level) and len(byte_level) == 1:
        if byte_level[0].get("add_prefix_space"):
            raise ConfigError(
                "a tokenizer that adds a space is not written as GGUF", hint="use `atoll model export hf`"
            )
        if byte_level[0].get("use_regex", True):
            patterns.append(_GPT2)
        if len(patterns) == 1 and patterns[0] in _SPLITS:
            return _SPLITS[patterns[0]]
    raise ConfigError(
        "llama.cpp has no name for how this tokenizer cuts texts", hint="use `atoll model export hf`"
    )


def _describe(writer: gguf.GGUFWriter, model: ModelSpec, about: Mapping[str, str]) -> None:
    for key, text in about.items():
        writer.add_string(key, text)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(model.vocab)
    writer.add_context_length(model.context)
    writer.add_embedding_length(model.dim)
    writer.add_block_count(model.layers)
    writer.add_feed_forward_length(model.ffn)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_rope_freq_base(model.rope_theta)
    writer.add_layer_norm_rms_eps(model.norm_eps)


def _add_tokenizer(writer: gguf.GGUFWriter, found: GgufTokenizer, serving: ServingSpec | None) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(found.split)
    writer.add_token_list(found.tokens)
    writer.add_token_types(found.kinds)
    writer.add_token_merges(found.merges)
    writer.add_add_bos_token(found.adds_bos)
    if serving is None:
        return
    if serving.bos is not None:
        writer.add_bos_token_id(serving.bos)
    if serving.eos:
        writer.add_eos_token_id(serving.eos[0])
    if serving.pad is not None:
        writer.add_pad_token_id(serving.pad)
    if serving.chat_template:
        writer.add_chat_template(serving.chat_template)


def _write_tensors(writer: gguf.GGUFWriter, model: ModelSpec, read: Callable[[str], Tensor]) -> None:
    """All tensors, with one in memory at a time."""
    names = gguf.get_tensor_name_map(_ARCHITECTURES[model_type_of(model)], model.layers)
    table = atoms(model)
    stretch = _stretch_factors(model)
    if stretch is not None:
        writer.add_tensor_info("rope_freqs.weight", stretch.shape, stretch.dtype, stretch.nbytes)
    for atom in table:
        size = 4 * int(np.prod(atom.shape))
        writer.add_tensor_info(_tensor_name(names, atom), atom.shape, np.dtype(np.float32), size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if stretch is not None:
        writer.write_tensor_data(stretch)
    for atom in table:
        values = (read(atom.name).to(torch.float32) / UNIT).reshape(atom.shape)
        writer.write_tensor_data(np.ascontiguousarray(_in_ggml_order(atom, values, model).numpy()))


def _tensor_name(names: gguf.TensorNameMap, atom: Atom) -> str:
    found = names.get_name(atom.name, try_suffixes=(".weight", ".bias"))
    assert found is not None, f"{atom.name}: GGUF names all atoms of a dense model"
    return found


def _in_ggml_order(atom: Atom, values: Tensor, model: ModelSpec) -> Tensor:
    """Rows of queries and keys as ggml rotates them.

    In Llama's files ggml turns the pairs (0, 1), (2, 3), … of a head, where the decoder turns (i, i + E/2). In
    those of Qwen2, Qwen3 and Gemma it turns pairs as the decoder does.
    """
    is_query = atom.name.endswith(".q_proj.weight")
    if model_type_of(model) != "llama" or not (is_query or atom.name.endswith(".k_proj.weight")):
        return values
    heads = model.heads if is_query else model.kv_heads
    return values.view(heads, 2, model.head_dim // 2, -1).transpose(1, 2).reshape(values.shape)


def _stretch_factors(model: ModelSpec) -> NDArray[np.float32] | None:
    """By how much each pair of a head turns more slowly `[E/2]`, float32; None for plain rotations."""
    if model.rope_stretch is None:
        return None
    even = np.arange(0, model.head_dim, 2, dtype=np.float64)
    turns_E2 = model.rope_theta ** (-even / model.head_dim)
    slowed_E2 = np.array(model.rope_stretch.stretched(turns_E2.tolist()))
    factors_E2: NDArray[np.float32] = (turns_E2 / slowed_E2).astype(np.float32)
    return factors_E2


def _is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC
