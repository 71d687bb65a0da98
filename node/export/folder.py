"""A whole Hugging Face folder: there completely, or not at all."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from atoll.node.export.config import config_of, model_of
from atoll.node.export.weights import load_weights, read_json, save_text, save_weights
from atoll.protocols.errors import ConfigError, DiskFault
from atoll.protocols.model import ModelSpec

CONFIG, GENERATION = "config.json", "generation_config.json"


class Checkpoint(NamedTuple):
    """What a folder holds."""

    model: ModelSpec
    theta: dict[str, Tensor]
    """int32 in units of 2⁻²⁴, by name."""


def save_folder(
    folder: Path, model: ModelSpec, read: Callable[[str], Tensor], tokenizer: Mapping[str, str]
) -> str:
    """Write the folder; the name of its class in transformers.

    `read` gives an atom as int32 in its shape; `tokenizer` is file names and texts. Raises ConfigError where
    something is already there or the model has no such class, DiskFault; then nothing was written.
    """
    config = config_of(model)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder} is already there", hint="choose a folder that is not")
    part = folder.absolute().with_name(f".{folder.absolute().name}.{os.getpid()}.part")
    try:
        part.mkdir()
        _fill(part, config, model, read, tokenizer)
        part.rename(folder)
        _sync(folder.absolute().parent)
    except OSError as error:
        raise DiskFault(f"{folder}: {error.strerror or error}", hint="nothing was exported") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return str(config["architectures"][0])


def load_folder(folder: Path) -> Checkpoint:
    """Model (with the longest context that it allows) and weights of a folder.

    Raises ConfigError, Divergence: one line that says what does not fit.
    """
    model = model_of(read_json(folder / CONFIG))
    return Checkpoint(model, load_weights(folder, model))


def _fill(
    part: Path,
    config: dict[str, Any],
    model: ModelSpec,
    read: Callable[[str], Tensor],
    tokenizer: Mapping[str, str],
) -> None:
    save_weights(part, model, read)
    generation = {"max_length": model.context, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    save_text(part / GENERATION, json.dumps(generation, indent=2))
    for name, text in tokenizer.items():
        save_text(part / name, text)
    save_text(part / CONFIG, json.dumps(config, indent=2))
    _sync(part)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
