"""Reads and writes a Hugging Face folder; a written folder is complete or absent."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from atoll.node.import_export.huggingface.config import config_from_model, model_from_config
from atoll.node.import_export.huggingface.fields import CONFIG
from atoll.node.import_export.huggingface.serving import (
    GENERATION,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    sampling_fields,
    special_token_fields,
)
from atoll.node.import_export.huggingface.weights import PUBLIC, load_weights, read_json, save_weights
from atoll.p2p.system.atomic_files import sync_folder, write_whole
from atoll.protocols.errors import ConfigError, DiskFault
from atoll.protocols.run.model_spec import ModelSpec
from atoll.protocols.run.sections.serving import ServingSpec


class HuggingFaceFolder(NamedTuple):
    """The model and the weights of a folder."""

    model: ModelSpec
    theta: dict[str, Tensor]
    """Atoms by name, int32 in units of 2⁻²⁴."""
    keys_halved: bool = False
    """See LoadedWeights."""


def save_folder(
    folder: Path,
    model: ModelSpec,
    read: Callable[[str], Tensor],
    tokenizer: Mapping[str, str],
    serving: ServingSpec | None = None,
    *,
    replace: bool = False,
) -> str:
    """Write the folder, and return the name of its class in transformers.

    `read` gives an atom as int32 in its shape; `tokenizer` has file names and texts; `serving` the special tokens
    and the sampling. `replace` allows an export to be there already. Raises ConfigError if something else is, or
    the model has no class, and DiskFault; then nothing was written.
    """
    config = config_from_model(model) | special_token_fields(serving)
    generation = {"max_length": model.context, **special_token_fields(serving), **sampling_fields(serving)}
    files = {GENERATION: json.dumps(generation, indent=2), **tokenizer, CONFIG: json.dumps(config, indent=2)}
    with new_folder(folder, replace=replace, is_export=_is_export) as part:
        save_weights(part, model, read)
        for name, text in files.items():
            write_whole(part / name, f"{text}\n".encode(), mode=PUBLIC)
    return str(config["architectures"][0])


@contextmanager
def new_folder(folder: Path, *, replace: bool, is_export: Callable[[Path], bool]) -> Iterator[Path]:
    """A folder beside `folder` to write into, which takes its place when the block ends well, and else is gone.

    `replace`: one that `is_export` accepts may be there. Raises ConfigError if something else is, DiskFault.
    """
    full = folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))
    if full and not (replace and is_export(folder)):
        hint = "--force replaces nothing but an export" if replace else "choose another, or --force for an export"
        raise ConfigError(f"{folder} is already there", hint=hint)
    part, old = (
        folder.absolute().with_name(f".{folder.absolute().name}.{os.getpid()}.{n}") for n in ("part", "old")
    )
    try:
        part.mkdir()
        yield part
        sync_folder(part)
        if full:
            folder.rename(old)
        part.rename(folder)
        sync_folder(folder.absolute().parent)
    except OSError as error:
        raise DiskFault(f"{folder}: {error.strerror or error}", hint="nothing was exported") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
        if old.exists() and not folder.exists():
            old.rename(folder)  # the new one could not take its place
        shutil.rmtree(old, ignore_errors=True)


def _is_export(folder: Path) -> bool:
    """Whether a folder holds nothing but what `save_folder` writes, which can be written again."""
    names = (
        {path.name for path in folder.iterdir() if not path.match("model*.safetensors*")}
        if folder.is_dir()
        else set()
    )
    return CONFIG in names and names <= {CONFIG, GENERATION, TOKENIZER_JSON, TOKENIZER_CONFIG, "README.md"}


def load_folder(folder: Path, report: Callable[[int, int], None] = lambda done, of: None) -> HuggingFaceFolder:
    """The model of a folder, with the longest context that it allows, and its weights; `report`: see load_weights.

    Raises ConfigError or Divergence with one line about what does not fit.
    """
    model = model_of(folder)
    return HuggingFaceFolder(model, *load_weights(folder, model, report))


def model_of(folder: Path) -> ModelSpec:
    """The model of a folder, with the longest context that it allows. Raises ConfigError, Divergence."""
    return model_from_config(read_json(folder / CONFIG))
