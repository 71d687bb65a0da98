"""Where the weights of a new run come from, if not from its seed. Options only: nothing here needs torch."""

import re
from pathlib import Path
from typing import NamedTuple

from atoll.protocols.errors import ConfigError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class UpcycleOptions(NamedTuple):
    """How a dense checkpoint becomes a mixture of experts (huggingface/upcycle.py)."""

    experts: int
    per_token: int
    noise_shift: int | None


class CheckpointSource(NamedTuple):
    """A joined universal checkpoint (join_shards.py)."""

    folder: Path


class HuggingFaceSource(NamedTuple):
    """A Hugging Face folder, and what is made of it."""

    folder: Path
    upcycle: UpcycleOptions | None
    without_fit: bool = False
    """Start even if the weights predict the run's text worse than token counts do (compatibility_check.py)."""


RunSource = CheckpointSource | HuggingFaceSource


def local_folder(folder: Path) -> Path:
    """The folder, which must be there. Raises ConfigError; for a name of the hub, with what to download."""
    if folder.is_dir():
        return folder
    if not folder.exists() and _HUB_ID.fullmatch(str(folder)):
        files = "'*.json' '*.jinja' '*.safetensors'"
        raise ConfigError(
            f"{folder} is no folder here, and atoll downloads no models",
            hint=f"`hf download {folder} --local-dir {folder.name} --include {files}`, then {folder.name}",
        )
    raise ConfigError(f"{folder} is no folder", hint="give a folder with config.json, safetensors, tokenizer.json")
