"""Loads a language model: the newest final weights of a run in this home, or a Hugging Face folder.

Weights of a home go from its saved state to `transformers` in memory, by the names and the config of an export.
"""

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from atoll.node.checkpoint.snapshot import Snapshot
from atoll.node.generation.language_model import LanguageModel
from atoll.node.import_export.export_run import atom_reader, tokenizer_json
from atoll.node.import_export.huggingface.config import config_from_model
from atoll.node.import_export.huggingface.ffn_slices import dense_of, joined
from atoll.node.import_export.huggingface.serving import sampling_fields, special_token_fields, tokenizer_fields
from atoll.node.import_export.huggingface.weights import published, tensor_names
from atoll.protocols.errors import ConfigError
from atoll.protocols.run.run_spec import RunSpec


def load_run(spec: RunSpec, found: Snapshot, blobs: Path, data: str, device: str) -> LanguageModel:
    """A run with the weights in `found`. `data`: as in `export_run`; `blobs` may hold the run's tokenizer.

    Raises ConfigError, also for a mixture without a class in transformers.
    """
    _quiet()
    whole = spec.model.base
    config = config_from_model(whole)
    serialised = tokenizer_json(spec.data, data, blobs)
    serving = spec.serving or None
    read = joined(whole, atom_reader(spec, found, blobs))
    names = tensor_names(dense_of(whole))
    tensors = {called: published(whole, name, read(name)) for name, called in names.items()}
    kind = getattr(transformers, config["architectures"][0])
    model = kind.from_pretrained(
        None, config=transformers.AutoConfig.for_model(**config), state_dict=tensors, dtype=torch.float32
    )
    model.generation_config = GenerationConfig(**special_token_fields(serving), **sampling_fields(serving))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(serialised),
        clean_up_tokenization_spaces=False,
        **tokenizer_fields(serving, serialised),
    )
    about = f"{spec.name}: final round {found.round}, digest {found.state.hex()[:16]}"
    return LanguageModel(_moved(model, device), tokenizer, f"{about}, {whole.parameters:,} parameters")


def load_model_folder(folder: Path, device: str) -> LanguageModel:
    """A folder with `config.json`, safetensors and `tokenizer.json`. No code of it is run, nothing is downloaded.

    Raises ConfigError with one line for a folder that transformers cannot load.
    """
    _quiet()
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} has no {name}", hint="give a folder that `atoll model export hf` wrote")
    local = {"local_files_only": True, "trust_remote_code": False}
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, dtype="auto", **local)
        tokenizer = AutoTokenizer.from_pretrained(folder, **local)
    except Exception as error:  # the libraries raise anything, tokenizers bare Exceptions
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{folder} cannot be loaded: {reason}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError(f"{folder}: its tokenizer is no {PreTrainedTokenizerFast.__name__}")
    return LanguageModel(_moved(model, device), tokenizer, f"{folder}: {model.num_parameters():,} parameters")


def _moved(model: transformers.PreTrainedModel, device: str) -> transformers.PreTrainedModel:
    try:
        return model.to(torch.device(device))
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"device {device!r} cannot be used: {reason}", hint="--device cpu") from error


def _quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
