"""Reads and writes a Hugging Face folder; a written folder is complete or absent."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from atoll.node.import_export.huggingface.config import config_from_model, model_from_config
from atoll.node.import_export.huggingface.fields import CONFIG
from atoll.node.import_export.huggingface.serving import GENERATION, sampling_fields, special_token_fields
from atoll.node.import_export.huggingface.weights import PUBLIC, load_weights, read_json, save_weights
from atoll.p2p.system.atomic_files import sync_folder, write_whole
from atoll.protocols.errors import ConfigError, DiskFault
from atoll.protocols.run.model_spec import ModelSpec
from atoll.protocols.run.serving import ServingSpec


class HuggingFaceFolder(NamedTuple):
    """The model and the weights of a folder."""

    model: ModelSpec
    theta: dict[str, Tensor]
    """Atoms by name, int32 in units of 2⁻²⁴."""


def save_folder(
    folder: Path,
    model: ModelSpec,
    read: Callable[[str], Tensor],
    tokenizer: Mapping[str, str],
    serving: ServingSpec | None = None,
) -> str:
    """Write the folder, and return the name of its class in transformers.

    `read` gives an atom as int32 in its shape; `tokenizer` has file names and texts; `serving` the special tokens
    and the sampling. Raises ConfigError if something is already there or the model has no class, DiskFault; then
    nothing was written.
    """
    config = config_from_model(model) | special_token_fields(serving)
    generation = {"max_length": model.context, **special_token_fields(serving), **sampling_fields(serving)}
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder} is already there", hint="choose a folder that is not")
    part = folder.absolute().with_name(f".{folder.absolute().name}.{os.getpid()}.part")
    try:
        part.mkdir()
        save_weights(part, model, read)
        files = {GENERATION: json.dumps(generation, indent=2), **tokenizer, CONFIG: json.dumps(config, indent=2)}
        for name, text in files.items():
            write_whole(part / name, f"{text}\n".encode(), mode=PUBLIC)
        sync_folder(part)
        part.rename(folder)
        sync_folder(folder.absolute().parent)
    except OSError as error:
        raise DiskFault(f"{folder}: {error.strerror or error}", hint="nothing was exported") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return str(config["architectures"][0])


def load_folder(folder: Path) -> HuggingFaceFolder:
    """The model of a folder, with the longest context that it allows, and its weights.

    Raises ConfigError or Divergence with one line about what does not fit.
    """
    model = model_from_config(read_json(folder / CONFIG))
    return HuggingFaceFolder(model, load_weights(folder, model))
