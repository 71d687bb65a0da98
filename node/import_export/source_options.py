"""Where the weights of a new run come from, if not from its seed. Words only: nothing here needs torch."""

from pathlib import Path
from typing import NamedTuple


class Upcycle(NamedTuple):
    """A dense checkpoint becomes a mixture of experts (`export/upcycle.py`)."""

    experts: int
    per_token: int
    noise_shift: int | None


class Saved(NamedTuple):
    """A universal checkpoint that was joined (`node/import_export/join_shards.py`)."""

    folder: Path


class Origin(NamedTuple):
    """A Hugging Face folder, and what is made of it."""

    folder: Path
    upcycle: Upcycle | None
    without_fit: bool = False
    """Start although the weights say less of the run's text than a count of its tokens
    (`node/import_export/compatibility_check.py`)."""
