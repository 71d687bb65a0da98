"""Where the weights of a new run come from, if not from its seed. Options only: nothing here needs torch."""

from pathlib import Path
from typing import NamedTuple


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
