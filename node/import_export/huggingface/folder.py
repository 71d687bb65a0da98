"""A whole Hugging Face folder: there completely, or not at all."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from atoll.node.import_export.huggingface.config import config_of, model_of
from atoll.node.import_export.huggingface.fields import CONFIG
from atoll.node.import_export.huggingface.serving import GENERATION, sampling, special_ids
from atoll.node.import_export.huggingface.weights import load_weights, read_json, save_text, save_weights
from atoll.protocols.errors import ConfigError, DiskFault
from atoll.protocols.run.model_spec import ModelSpec
from atoll.protocols.run.serving import ServingSpec


class HuggingFaceFolder(NamedTuple):
    """What a folder holds."""

    model: ModelSpec
    theta: dict[str, Tensor]
    """int32 in units of 2⁻²⁴, by name."""


def save_folder(
    folder: Path,
    model: ModelSpec,
    read: Callable[[str], Tensor],
    tokenizer: Mapping[str, str],
    serving: ServingSpec | None = None,
) -> str:
    """Write the folder; the name of its class in transformers.

    `read` gives an atom as int32 in its shape; `tokenizer` is file names and texts; `serving` what the configs
    say of special tokens and sampling. Raises ConfigError where something is already there or the model has no
    such class, DiskFault; then nothing was written.
    """
    config = config_of(model) | special_ids(serving)
    generation = {"max_length": model.context, **special_ids(serving), **sampling(serving)}
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder} is already there", hint="choose a folder that is not")
    part = folder.absolute().with_name(f".{folder.absolute().name}.{os.getpid()}.part")
    try:
        part.mkdir()
        save_weights(part, model, read)
        _fill(part, {GENERATION: _text(generation), **tokenizer, CONFIG: _text(config)})
        part.rename(folder)
        _sync(folder.absolute().parent)
    except OSError as error:
        raise DiskFault(f"{folder}: {error.strerror or error}", hint="nothing was exported") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return str(config["architectures"][0])


def load_folder(folder: Path) -> HuggingFaceFolder:
    """Model (with the longest context that it allows) and weights of a folder.

    Raises ConfigError, Divergence: one line that says what does not fit.
    """
    model = model_of(read_json(folder / CONFIG))
    return HuggingFaceFolder(model, load_weights(folder, model))


def _text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2)


def _fill(part: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        save_text(part / name, text)
    _sync(part)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
